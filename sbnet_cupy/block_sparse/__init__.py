"""SBNet: blocks of activations, computed only where a mask is set."""
