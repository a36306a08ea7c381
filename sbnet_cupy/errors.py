"""The exceptions this library raises, each a subclass of the built-in a caller would expect."""


class ShapeError(ValueError):
    """An array or a size does not have the shape the operation needs."""


class DTypeError(TypeError):
    """An argument is not an array, or its element type cannot be used here."""


class DeviceError(RuntimeError):
    """Arrays live in different libraries or on different devices, or no device is available."""


class CapacityError(RuntimeError):
    """There are more active blocks, or sites, than ``capacity`` has room for."""
