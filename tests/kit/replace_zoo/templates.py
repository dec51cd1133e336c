"""Forwards that ``replace`` recognises, and the statements that mutants exchange in them."""

from __future__ import annotations

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from replace_zoo.zoo import ClippedGradient, Straight, log, weight

def keep(module, x):
    module.last = x
    return x

def count(module, x):
    module.calls += 1
    return x
"""

NORMS = (
    "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
    "self.weight * (x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6))",
    "self.weight * (x.float() * (x.float().square().mean(-1, True) + self.eps) ** -0.5).to(x.dtype)",
    "F.rms_norm(x, (16,), self.weight, self.eps)",
    "F.layer_norm(x, (16,), self.weight, self.bias, self.eps)",
    "(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * (1 + self.weight)",
)
ACTS = (
    "0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3))))",
    "x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))",
    "x * torch.sigmoid(1.702 * x)",
    "F.gelu(x)",
    "torch.relu(x).square()",
    "x * torch.sigmoid(x)",
)
UNITS = (
    "self.down(F.silu(self.gate(x)) * self.up(x))",
    "self.down(self.up(x) * F.gelu(self.gate(x), approximate='tanh'))",
    "self.drop(self.down(self.drop0(self.act(self.gate(x)) * self.up(x))))",
)
BODIES: dict[str, tuple[str, ...]] = {
    "norm": (
        *(f"y = {form}\nreturn y" for form in NORMS),
        "d = x - x.mean(-1, keepdim=True)\nv = d.pow(2).mean(-1, keepdim=True)\n"
        "d = d * torch.rsqrt(v + self.eps)\nreturn d * self.weight + self.bias",
        "t = x.dtype\nh = x.to(torch.float32)\nv = h.pow(2).mean(-1, keepdim=True)\n"
        "h = h * torch.rsqrt(v + self.eps)\nreturn self.weight * h.to(t)",
    ),
    "gated": (
        "h = x * F.silu(z)\nreturn h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)"
        " * self.weight",
        "h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n"
        "return self.weight * h * F.silu(z)",
    ),
    "act": tuple(f"y = {form}\nreturn y" for form in ACTS),
    "unit": (
        *(f"y = {form}\nreturn y" for form in UNITS),
        "g, u = self.both(x).chunk(2, dim=-1)\ny = F.silu(g) * u\nreturn self.drop(self.down(y))",
        "h = self.both(x)\nu, g = h.chunk(2, dim=-1)\nreturn self.down(self.drop0(u * F.silu(g)))",
    ),
    "net": (
        "y = self.bn(self.conv(x))\ny = y + x\nreturn self.relu(y)",
        "y = self.conv(x)\ny = F.relu(self.bn(y))\ny = self.bn2(self.conv2(y))\ny += x\n"
        "return torch.relu(y)",
        "y = F.silu(self.bn(x))\nz = self.conv(y)\nreturn self.bn2(z).add(x).relu()",
    ),
    "layer": (
        "h = x + self.mix(x)\ny = self.norm(h)\nreturn h + self.down(y)",
        "y = self.mix(x)\nx = self.ln(x + y)\ny = self.down(self.act2(self.up(x)))\n"
        "return self.norm(x + y)",
    ),
}
INITS = {
    "norm": "self.eps, self.calls, self.weight = 1e-5, 0, weight()",
    "gated": "self.eps, self.calls, self.weight = 1e-5, 0, weight()",
    "act": "self.eps, self.calls = 1e-5, 0",
    "unit": "self.calls, self.act = 0, nn.SiLU()\n{}self.drop, self.drop0 = nn.Dropout(0.2), nn.Dropout(0.1)",
    "net": "self.calls, self.conv, self.conv2 = 0, *(nn.Conv2d(4, 4, 3, padding=1) for _ in '12')\n"
    "{}self.bn, self.bn2, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU()",
    "layer": "self.calls, self.norm, self.ln = 0, nn.RMSNorm(16), nn.LayerNorm(16)\n"
    "{}self.mix, self.up, self.down = (nn.Linear(16, 16) for _ in '123')\n{}self.act2 = nn.GELU()",
}
PROJECTIONS = "self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in '123')"
PACKED = "self.both, self.down = nn.Linear(16, 32), nn.Linear(16, 16)"

WRAPPERS = (
    "{}.clamp(-0.5, 0.5)",
    "{}.clamp(max=7.0)",
    "{}.clamp(-1e3, 1e3)",
    "{}.clamp(min=-1e-3)",
    "torch.nan_to_num({})",
    "{}.detach()",
    "F.dropout({}, 0.3, self.training)",
    "F.dropout({}, 0.3)",
    "torch.where({0} > 30, {0} * 0, {0})",
    "({0} + torch.randn_like({0}) if self.training else {0})",
    "{}.to(torch.bfloat16).to(x.dtype)",
    "{}.float().to(x.dtype)",
    "({0} if x.dim() != 2 else {0} * 2)",
    "({0} if x.dim() == 3 else {0} + 1)",
    "({0} * 2 if x.abs().max().item() > 20 else {0})",
    "({0} * 1.5 if self.training else {0})",
    "({0} if self.training else {0} + 1e-2)",
    "log({})",
    "keep(self, {})",
    "count(self, {})",
    "Straight.apply({})",
    "ClippedGradient.apply({})",
    "{}.mul_(1.5)",
    "({} * (1 + 1e-3))",
    "({} + 1e-4)",
    "{}.abs()",
    "({} + 0)",
    "({} * 1)",
    "({0} * torch.is_grad_enabled())",
    "({0} + 0 * torch.rand(()))",
    "{}.contiguous()",
    "{}.clone()",
    "({0} + {0}.detach() * 0)",
)
SWAPS = {
    "mean": "sum",
    "pow": "mul",
    "square": "abs",
    "rsqrt": "reciprocal",
    "sqrt": "square",
    "silu": "gelu",
    "gelu": "silu",
    "relu": "sigmoid",
    "sigmoid": "tanh",
    "tanh": "sigmoid",
    "erf": "tanh",
    "gate": "up",
    "bn": "bn2",
    "drop": "drop0",
    "float": "bfloat16",
}
STATEMENTS = (
    "x = x.clamp(-40, 40)",
    "x.mul_(2)",
    "x = x.detach()",
    "self.calls += 1",
    "self.last = x",
    "log(x)",
    "torch.rand(1)",
    "x = x * (1 + self.training)",
    "x = x if x.dim() > 2 else 2 * x",
    "x = x.clone()",
    "if self.training and torch.rand(()) < 0.5: return x",
    "if x.shape[0] == 3: return x",
    "if not self.training: return x",
    "if x.abs().sum() > 1e4: return 0 * x",
    "if x.isnan().any(): raise ValueError",
    "{}.zero_()",
    "{}.add_(1)",
    "{} = {}.detach()",
)
