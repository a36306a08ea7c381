"""The modules of :mod:`sbnet_cupy.torch.nn`."""
