"""What every test has: the `gpu(n)` marker. (`soak` is left out by pyproject.toml unless asked for.)"""

import pytest


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu(n) where there are fewer than n CUDA devices, and say how many there are."""
    marked = [(item, marker) for item in items if (marker := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch  # here, so that collecting CPU-only files stays fast

    found = torch.cuda.device_count()
    for item, marker in marked:
        (wanted,) = marker.args
        if found < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device(s), found {found}"))
