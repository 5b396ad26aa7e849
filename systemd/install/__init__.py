"""What ``weenv install`` puts on a node, and how it is taken away again."""
