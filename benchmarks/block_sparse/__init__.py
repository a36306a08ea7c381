"""One benchmark for each operation on blocks, and for what a call costs the calling thread."""
