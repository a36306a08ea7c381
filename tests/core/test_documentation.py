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


def test_what_an_adapter_does_not_have_is_left_out():
    def core(x, out=None, y=None):
        """Do something.

        Parameters
        ----------
        x : array, or Packed
            Contiguous.
        out : array, optional
            Receives the result,
            and is returned.
        y : array
            Another.

        Source: a book.

        Examples
        --------
        """

    @documented_as(core, "tensor", without=(r", or Packed", r"^Source: .*?\n\n"))
    def own(x, y=None):
        """Do something.

        Examples
        --------
        """

    words = " ".join(own.__doc__.split())
    assert "x : tensor Contiguous. y : tensor Another. Examples" in words
