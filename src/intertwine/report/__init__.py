"""What a person reads: outlines of a symmetry, its picture, and self-contained HTML pages."""
