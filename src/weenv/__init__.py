"""WeEnv: lazy, composable, elastic software environments on containerd."""

__version__ = "0.1.0"
