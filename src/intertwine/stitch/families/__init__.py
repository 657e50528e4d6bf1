"""The families of maps that can stand between two networks. Every file of this folder registers the families it defines."""
