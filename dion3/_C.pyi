"""Build facts of the native part; importing it registers the operators dion3::*."""

from torch import Tensor

compiler: str
cuda: bool
torch_version: str

def geometry(tensors: list[Tensor]) -> bytes: ...
def runs_on(device: int) -> bool: ...  # with cuda only
def selection_count(fraction: float, n: int) -> int: ...
