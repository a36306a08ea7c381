"""How XLA compiles what these tests call."""

import pytest

AS_USERS_DO = "test_memory"  # what is copied depends on XLA's optimisations


@pytest.fixture(scope="module", autouse=True)
def _few_optimisations(request, jax):
    """Compile for the CPU with few optimisations: most functions are called once."""
    few = jax.default_backend() == "cpu" and not request.module.__name__.endswith(AS_USERS_DO)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", few)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
