"""A network on a stack of blocks: what looks at neighbours finds them through a BlockTable."""
