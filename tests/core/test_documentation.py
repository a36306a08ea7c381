"""Docstrings of adapters, in words for the arrays of one library."""

from sbnet_cupy.core.documentation import documented_as


def core(x):
    """Do something.

    Parameters
    ----------
    x : array, or an array of arrays
        Not an array-like or NumPy arrays. An integer NumPy
        array, array-like of int.

    Examples
    --------
    """


def test_what_is_of_numpy_keeps_its_name():
    @documented_as(core, "tensor")
    def own(x):
        """Do something to tensors.

        Examples
        --------
        """

    parameters = " ".join(own.__doc__.split()).split("---------- ")[1].split(" Examples")[0]
    assert parameters == (
        "x : tensor, or a tensor of tensors Not an array-like or NumPy arrays. An integer NumPy "
        "array, array-like of int."
    )
