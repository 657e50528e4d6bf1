"""The families of maps that can stand between two networks, one file each."""
