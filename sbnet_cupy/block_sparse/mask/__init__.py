"""From a mask to the list of active blocks, and how masks are made."""
