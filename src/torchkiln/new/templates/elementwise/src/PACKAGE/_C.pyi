from torch import Tensor

has_cuda: bool

def OPNAME(x: Tensor, gate: Tensor, scale: float, /) -> Tensor: ...
