"""What the benchmarks share: cases, arrays, checks, clocks, rows, tables, pictures."""
