"""Images in the formats of others on the FUSE plane: the tests of test_foreign.py on nodes whose configuration forces it."""

from __future__ import annotations

import pytest

from test_foreign import (  # noqa: F401 (collected here once more)
    NODE_SETTINGS,
    chunked,
    line,
    tars,
    test_every_layer_is_what_the_unpack_leaves,
    unpacked,
)
from weenv_testkit.fusenode import module_node  # noqa: F401

pytestmark = pytest.mark.soak
