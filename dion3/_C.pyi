"""Build facts of the native part; importing it registers the operators dion3::*."""

compiler: str
cuda: bool
torch_version: str

def selection_count(fraction: float, n: int) -> int: ...
