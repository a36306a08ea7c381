"""Calls of kernels from XLA, in a process without a GPU: into NumPy, by the same ways."""


def call_back_on_cpu(setattr=setattr):
    """Take NumPy's plans for kernels, and a CPU for where they run, in sbnet_cupy.jax."""
    from sbnet_cupy.jax import _kernel_calls, _site_kernels

    for module, name, value in (
        (_kernel_calls, "has_gpu", lambda: True),
        (_kernel_calls, "current_device", lambda: "cpu"),
        (_kernel_calls, "computes_on_gpu", lambda x: True),
        (_kernel_calls, "_is_by_kernels", lambda plan: True),
        (_kernel_calls, "_scratch", lambda key, specs: 0),
        (_kernel_calls, "_PLATFORM", "cpu"),
        (_site_kernels, "_has_finder", lambda *given: False),  # the memory of these is CuPy's
        (_site_kernels, "_has_lister", lambda *given: False),
    ):
        setattr(module, name, value)
