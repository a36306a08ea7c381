"""Training a sparsified network: gradients, batch norm over active pixels, autocast, DDP."""

import copy
import time

import pytest

torch = pytest.importorskip("torch")


from sbnet_cupy import ShapeError  # noqa: E402  (after PyTorch is there)
from support import networks  # noqa: E402  (needs PyTorch)
from support.networks import assert_near, image  # noqa: E402
from support.torch_autograd import assert_near_steps, train_step  # noqa: E402

nn = torch.nn
F = torch.nn.functional
tree_leaves = torch.utils._pytree.tree_leaves

SIZE, BLOCK = (61, 84), 16


@pytest.mark.parametrize("name", networks.FAMILIES)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_on_a_full_mask_it_trains_as_the_dense_network(st, name, break_even):
    """Values, all gradients, running statistics."""
    size = (64, 84) if name == "csp" else SIZE
    dense = networks.network(name).double().train()
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    sparse.break_even = break_even
    x, full = image(size=size), torch.ones(2, *size)
    step = train_step(sparse.model, x, full, call=sparse)
    assert_near_steps(step, train_step(dense, x))


@pytest.mark.parametrize("name", networks.FAMILIES)
def test_gradients_on_a_mask(st, name):
    """Batch norms in evaluation, so that the oracle has the same statistics."""
    size = (64, 84) if name == "csp" else SIZE
    dense = networks.network(name).double()
    for module in dense.modules():  # the oracle cannot zero what is differentiated in place
        if hasattr(module, "inplace"):
            module.inplace = False
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    x = image(size=size)
    on, mask = networks.blocks((2, *size), BLOCK, 0.4)
    if name.startswith(("resnet", "resnext")):
        for module in (*dense.modules(), *sparse.modules()):
            if isinstance(module, networks.Residual):
                module.forward = plain_residual.__get__(module)
    expected = train_step(dense, x, call=lambda x: networks.oracle(dense, x, on, BLOCK))
    assert_near_steps(train_step(sparse.model, x, mask, call=sparse), expected)


def plain_residual(self, x):
    """Add without writing in place."""
    return self.relu(self.body(x) + (x if self.downsample is None else self.downsample(x)))


@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_strides_of_few_channels_in_single_precision(st, break_even):
    """oneDNN's gradient of such a convolution ended the process on whole images."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 1, 2, bias=False))
    x, steps = image(size=(48, 72)), []
    for _ in range(3):
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
        sparse.break_even = break_even
        steps.append(train_step(sparse.model, x.float(), torch.ones(2, 48, 72), call=sparse))
    expected = train_step(dense.double(), x)
    for step in steps:
        for actual, exact in zip(tree_leaves(step), tree_leaves(expected), strict=True):
            assert_near(actual, exact, "float32")


DIVIDED = {
    "a map": lambda net, x: x / net.map,
    "a part of the stack": lambda net, x: x / torch.cat([x, x + 1], 1).roll(1, 1)[:, :4],
    "an image": lambda net, x: x / x.roll(2, 3),
    "a maximum": lambda net, x: x * (1 - F.max_pool2d((x.detach() < 0).double(), 3, 1, 1)),
    "a norm": lambda net, x: net.norm(torch.log(x - 0.5)),
}


class Divided(nn.Module):
    """A function of positive activations that is infinite at 0."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.register_buffer("map", torch.rand(SIZE) + 1)
        self.norm, self.function = nn.BatchNorm2d(4), function

    def forward(self, x):
        """Return the convolution of what the function makes."""
        return self.after(self.function(self, F.softplus(self.before(x)) + 0.5))


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_what_lies_outside_the_image_is_in_no_gradient(st, name, break_even):
    """In the last blocks are pixels that the image does not have: 0 / 0 is in no weight."""
    dense = Divided(DIVIDED[name]).double()
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
    sparse.break_even = break_even
    x = image()
    step = train_step(sparse.model, x, torch.ones(2, *SIZE), call=sparse)
    assert_near_steps(step, train_step(dense, x))


@pytest.mark.parametrize("break_even", [2.0, 0.0])
def test_batch_norm_takes_active_pixels_inside_the_image(st, break_even):
    dense = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3)).double()
    sparse = st.sparsify(copy.deepcopy(dense), BLOCK).train()
    sparse.break_even = break_even
    x = image()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.5)
    y = sparse(x, mask)
    with torch.no_grad():
        pixels = dense[0](x * mask[:, None]).movedim(1, -1)[mask]
        expected = torch.zeros(2, *SIZE, 4, dtype=torch.float64)
        expected[mask] = dense[1].train()(pixels.t()[None, :, :, None])[0, :, :, 0].t()
    assert_near(y.detach(), expected.movedim(-1, 1))
    for name, value in dense[1].named_buffers():
        assert_near(dict(sparse.model[1].named_buffers())[name], value)


def test_an_empty_mask_trains(st):
    sparse = st.sparsify(networks.network("resnet_basic").double().train(), BLOCK)
    sparse(image(), torch.zeros(2, *SIZE)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in sparse.parameters())
    assert all(b.isfinite().all() for b in sparse.buffers())


def test_it_trains_under_autocast(st):
    sparse = st.sparsify(networks.network("unet").train(), BLOCK)
    x = image().float()
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    optimizer, losses = torch.optim.Adam(sparse.parameters(), lr=0.01), []
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = sparse(x, mask)
            assert y.dtype == torch.bfloat16
            loss = F.mse_loss(y.float() * mask[:, None], 0.5 * mask[:, None].expand(-1, 2, -1, -1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    sparse.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = sparse(x, torch.ones(2, *SIZE))
        expected = sparse.model(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    depth = sum(isinstance(m, nn.Conv2d) for m in sparse.modules())
    bound = 2 * depth * torch.finfo(torch.bfloat16).eps * (1 + expected.abs().max())
    assert (y - expected).abs().max() <= bound


@torch.no_grad()
def test_a_transposed_convolution_has_the_dtype_of_autocast(st):
    dense = nn.ConvTranspose2d(3, 4, 4, 2, 1)
    for break_even in (2.0, 0.0):
        sparse = st.sparsify(dense, BLOCK)
        sparse.break_even = break_even
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = sparse(image().float(), torch.ones(2, *SIZE))
        assert y.dtype == torch.bfloat16
        assert_near(y, dense.double()(image()), "bfloat16", terms=64)
        dense.float()


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # as those of channels_last
@pytest.mark.parametrize("cast", [False, True], ids=["double", "autocast"])
def test_a_step_of_distributed_data_parallel(st, device, tmp_path, monkeypatch, cast):
    """One process: gradients are those of the network alone, under autocast to the bit.

    That of the image is PyTorch's own, where cuDNN must be told to give the same bits.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    distributed, where = torch.distributed, torch.device(device).type
    if not distributed.is_available():
        pytest.skip("needs torch.distributed")
    dense = networks.network("resnet_basic").train().to(device)
    x, mask = image().to(device), networks.blocks((2, *SIZE), BLOCK, 0.4)[1].to(device)
    dense, x = (dense, x.float()) if cast else (dense.double(), x)
    alone, sparse = (st.sparsify(copy.deepcopy(dense), BLOCK) for _ in range(2))
    store, backend = f"file://{tmp_path}/store", "gloo" if where == "cpu" else "nccl"
    distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        with torch.autocast(where, torch.bfloat16, enabled=cast):
            # What wraps the network must be gone before its process group is, or that may hang.
            call = nn.parallel.DistributedDataParallel
            actual = train_step(sparse, x, mask, call=call(sparse))
    finally:
        distributed.destroy_process_group()
    with torch.autocast(where, torch.bfloat16, enabled=cast):
        expected = train_step(alone, x, mask)
    if cast:
        pairs = zip(*map(tree_leaves, (actual, expected)), strict=True)
        assert all(torch.equal(a, e) for a, e in pairs)
    else:
        assert_near_steps(actual, expected)


RANKS, STEPS = 2, 2


def shard(rank, step):
    """Return the image and the mask of a process; in the last step one has no active block."""
    x, (_, mask) = image()[rank : rank + 1], networks.blocks((2, *SIZE), BLOCK, 0.4, seed=step)
    return x, mask[rank : rank + 1] & (step + 1 < STEPS or rank != 1)


def train_in_process(rank, folder, sparse):
    """Train one of several replicas; save what it has learned."""
    distributed = torch.distributed
    torch.set_num_threads(1)
    sparse = copy.deepcopy(sparse)  # out of the memory that the processes share
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    try:
        train_together(rank, sparse)
        torch.save(sparse.state_dict(), f"{folder}/{rank}.pt")
    finally:
        distributed.destroy_process_group()


def train_together(rank, sparse):
    """Train one of several replicas. What wraps it is gone before its process group is destroyed,
    which may wait for it forever.
    """
    wrapped = nn.parallel.DistributedDataParallel(sparse)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(*shard(rank, step)).square().sum().backward()
        optimizer.step()


def spawn(function, arguments, count, seconds=300):
    """Run a function in processes; end them, and fail, if they take longer."""
    context = torch.multiprocessing.spawn(function, arguments, count, join=False)
    end = time.monotonic() + seconds
    while not context.join(timeout=max(end - time.monotonic(), 0)):
        if time.monotonic() >= end:
            for process in context.processes:
                process.kill()
            pytest.fail(f"processes were not done after {seconds} s")


@pytest.mark.exhaustive  # each process imports PyTorch
def test_training_in_two_processes(st, tmp_path):
    """Each has masks of its own; gradients are averages, buffers those of the first process."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    first = st.sparsify(networks.network("resnet_basic").double().train(), BLOCK)
    replicas = [copy.deepcopy(first) for _ in range(RANKS)]
    spawn(train_in_process, (str(tmp_path), first), RANKS)
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.01, momentum=0.9) for r in replicas]
    for step in range(STEPS):
        for replica in replicas[1:]:
            for own, sent in zip(replica.buffers(), replicas[0].buffers(), strict=True):
                own.copy_(sent)
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            replica(*shard(rank, step)).square().sum().backward()
        for together in zip(*(r.parameters() for r in replicas), strict=True):
            mean = sum(p.grad for p in together) / RANKS
            for p in together:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    for rank, replica in enumerate(replicas):
        learned = torch.load(f"{tmp_path}/{rank}.pt")
        assert learned.keys() == replica.state_dict().keys()
        for name, value in replica.state_dict().items():
            assert_near(learned[name], value, terms=1 << 17)


def test_same_input_same_gradients(st):
    dense = networks.network("mobilenet").train()
    x, results = image().float(), []
    _, mask = networks.blocks((2, *SIZE), BLOCK, 0.4)
    for _ in range(2):
        sparse = st.sparsify(copy.deepcopy(dense), BLOCK)
        sparse(x, mask).square().sum().backward()
        results.append([p.grad for p in sparse.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_graphed_calls_train_as_plain_ones(st, device, autocast):
    """Results, gradients, those that add up over calls too, and running statistics."""
    size, kind = (2, 64, 96), torch.device(device).type
    dense = networks.network("resnet_basic").to(device, memory_format=torch.channels_last)
    sparse = st.sparsify(dense, 16, capacity=30).train()
    plain = st.sparsify(copy.deepcopy(dense), 16, capacity=30).train()
    x, mask = torch.randn(2, 3, *size[1:], device=device), networks.blocks(size, 16, 0.3)[1]
    mask = mask.to(device)
    held = sparse(x, mask)  # and with it the nodes that add up gradients, on another stream
    before = [t.clone() for t in (*sparse.parameters(), *sparse.buffers())]
    cast = torch.autocast(kind, torch.bfloat16, enabled=autocast, cache_enabled=False)
    random = torch.get_rng_state()
    with cast:
        graphed = sparse.graphed(x, mask)
    assert torch.equal(torch.get_rng_state(), random)
    for a, b in zip(before, (*sparse.parameters(), *sparse.buffers()), strict=True):
        assert torch.equal(a, b)
    plain.load_state_dict(sparse.state_dict())
    held.sum().backward()
    depth = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in dense.modules())
    bound = depth * torch.finfo(torch.bfloat16).eps  # cuBLAS may choose another kernel
    kept = []
    for seed in range(4):
        torch.manual_seed(seed)
        x, found = torch.randn_like(x), []
        mask = networks.blocks(size, 16, 0.3, seed=seed)[1].to(device)
        for run, net in ((graphed, sparse), (plain, plain)):
            if seed != 2:  # where gradients are added to those before
                net.zero_grad()
            with cast:
                y = run(x, mask)
            y.float().square().mean().backward()
            numbers = [y.detach(), *(p.grad for p in net.parameters()), *net.buffers()]
            found.append(numbers)
        kept.append([(t, t.clone()) for t in found[0][: -len(list(dense.buffers()))]])
        for a, b in zip(*found, strict=True):
            a, b = a.double(), b.double()
            assert (a - b).norm() <= bound * b.norm()
    # Of results, and gradients that were not added to, calls that follow write nothing.
    for one in (0, 2):
        assert all(torch.equal(t, as_it_was) for t, as_it_was in kept[one])
    sparse.eval(), plain.eval()
    with torch.no_grad():
        a, b = sparse(x, mask).double(), plain(x, mask).double()
    assert (a - b).norm() <= bound * b.norm()


def test_what_graphed_calls_in_training_refuse(st, device):
    dense = networks.network("fcn").to(device)
    sparse = st.sparsify(dense, BLOCK).train()
    x, mask = image().float().to(device), torch.ones(2, *SIZE, device=device)
    run = sparse.graphed(x, mask)
    assert run(x, mask)["out"].requires_grad
    with pytest.raises(ShapeError, match="x and mask must be like those"):
        run(x[:1], mask[:1])
    with pytest.raises(RuntimeError, match="whether x requires a gradient"):
        run(x.clone().requires_grad_(), mask)
    sparse.eval()
    with pytest.raises(RuntimeError, match="training, autocast"):
        run(x, mask)
    sparse.train()
    given = x.clone().requires_grad_()
    sparse.graphed(given, mask)(given, mask)["out"].sum().backward()
    assert given.grad.shape == x.shape and given.grad.abs().max() > 0


@pytest.mark.gpu
def test_graphs_in_training_see_what_has_changed(st, require):
    require("gpu")
    dense = networks.network("fcn").to("cuda")
    sparse = st.sparsify(dense, BLOCK).train()
    x, mask = image().float().to("cuda"), torch.ones(2, *SIZE, device="cuda")
    run = sparse.graphed(x, mask)
    first, second = run(x, mask)["out"], run(2 * x, mask)["out"]
    second.sum().backward()
    with pytest.raises(RuntimeError, match="must be computed before the next call"):
        first.sum().backward()
    weight = next(sparse.parameters())
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="has changed since"):
        run(x, mask)
    weight.requires_grad_(True)
    run(x, mask)
    norm = next(m for m in sparse.modules() if isinstance(m, nn.BatchNorm2d))
    norm.eps *= 2
    with pytest.raises(RuntimeError, match="has changed since"):
        run(x, mask)
    handle = norm.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="forward hooks"):
        sparse.graphed(x, mask)
    handle.remove()
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    assert sparse.graphed(x, mask)(x, mask)["out"].requires_grad
