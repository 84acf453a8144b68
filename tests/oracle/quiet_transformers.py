"""transformers without its messages. Modules of tests that import it are skipped if it is not installed."""

import pytest

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
