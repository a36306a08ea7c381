"""A U-Net of SparseConvNet's layers, and points for it."""

SIZE, SAMPLES = 19, 2


def points(torch, n, seed, device="cpu", size=17, samples=SAMPLES):
    """Return what an InputLayer takes: n points, some at the same sites."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(0, size, (n, 2), generator=generator)
    sample = torch.randint(0, samples, (n, 1), generator=generator)
    features = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return [torch.cat([place, sample], 1).to(device), features.to(device), samples]


def unet(torch, scn, device="cpu", *ends):
    """Return a U-Net with random batch norms; its result is a row for each point, or ``ends``."""
    torch.manual_seed(0)
    net = scn.Sequential(
        scn.InputLayer(2, SIZE, mode=4),
        scn.SubmanifoldConvolution(2, 3, 4, 3, True),
        scn.UNet(2, 1, [4, 6, 8], residual_blocks=True, downsample=[3, 2]),
        *(ends or (scn.NetworkInNetwork(4, 5, True), scn.OutputLayer(2))),
    ).double()
    for layer in net.modules():
        if isinstance(layer, scn.BatchNormalization):
            layer.running_mean.normal_()
            layer.bias.data.normal_()
    return net.to(device)
