"""All tests, in layers. As a package, so that a module has one name and is imported once."""

import pytest

from app.web.gradio_import import skip_stubs

pytest.register_assert_rewrite("tests.support")
skip_stubs()
