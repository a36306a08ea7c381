"""The two messages of SparseConvNet's hello world."""

MESSAGES = [
    [" X   X  XXX  X    X    XX     X       X   XX   XXX   X    XXX   ",
     " X   X  X    X    X   X  X    X       X  X  X  X  X  X    X  X  ",
     " XXXXX  XX   X    X   X  X    X   X   X  X  X  XXX   X    X   X ",
     " X   X  X    X    X   X  X     X X X X   X  X  X  X  X    X  X  ",
     " X   X  XXX  XXX  XXX  XX       X   X     XX   X  X  XXX  XXX   "],
    [" XXX              XXXXX      x   x     x  xxxxx  xxx ",
     " X  X  X   XXX       X       x   x x   x  x     x  x ",
     " XXX                X        x   xxxx  x  xxxx   xxx ",
     " X     X   XXX       X       x     x   x      x    x ",
     " X     X          XXXX   x   x     x   x  xxxx     x "],
]  # fmt: skip
