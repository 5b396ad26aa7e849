"""All that test_lazy_containerd.py asks of the kernel's plane, asked of the FUSE plane."""

from __future__ import annotations

import pytest

from test_lazy_containerd import *  # noqa: F403
from weenv_testkit.fusenode import module_node  # noqa: F401

pytestmark = pytest.mark.soak
