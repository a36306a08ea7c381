"""How XLA compiles what these tests call, and plans for a GPU that is not there."""

import pytest

from support.jax_callbacks import plan_without_gpu

# Of these, all is XLA's own: what is called back from XLA, and copied for it, depends on its
# optimisations, and is compiled as users compile it.
XLA_ALONE = ("test_stack", "test_sites", "test_site_norm", "test_site_pool", "test_submanifold")


@pytest.fixture(scope="module", autouse=True)
def _few_optimisations(request, jax):
    """Compile for the CPU with few optimisations: most functions are called once."""
    own = request.module.__name__.rpartition(".")[2] in XLA_ALONE
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", own and jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def planned(sbj, require, monkeypatch):
    """Return a function that has calls planned for a GPU that is not there."""
    require("cupy")  # whose arrays can have addresses without memory
    with plan_without_gpu(monkeypatch.setattr) as plan_for:
        yield plan_for
