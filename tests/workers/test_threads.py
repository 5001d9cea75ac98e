"""One thread while hosts train, and the caller's number afterwards."""

import pytest
import torch

from simic.workers.threads import single_thread


def test_the_number_of_threads_is_restored_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError, match="1"), single_thread():
            raise KeyError(torch.get_num_threads())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
