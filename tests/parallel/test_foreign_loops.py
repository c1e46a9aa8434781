"""Training loops as published projects write them, with `nn.DataParallel` replaced, against one device.

Each loop wraps its networks by `wrap(module, dim=0)`, trains them for some steps on a batch of 5, and returns the
values that it logs and its networks. Losses, weights and buffers must be those of the bare networks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segapp.parallel import BalancedDataParallel, convert_sync_batchnorm
from tests.support.parallel_cases import relative_error


class Blur(torch.autograd.Function):
    """A blur whose backward pass is another function, as in style-based GANs, for second derivatives."""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(kernel)
        return F.conv2d(x, kernel, padding=1, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        return BlurBackward.apply(grad, *ctx.saved_tensors), None


class BlurBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, kernel):
        ctx.save_for_backward(kernel)
        return F.conv_transpose2d(grad, kernel, padding=1, groups=grad.shape[1])

    @staticmethod
    def backward(ctx, grad):
        return F.conv2d(grad, *ctx.saved_tensors, padding=1, groups=grad.shape[1]), None


class Equalized:
    """A hook that sets a layer's weight before each pass."""

    def __call__(self, layer, _):
        layer.weight = layer.weight_orig * (2 / layer.weight_orig[0].numel()) ** 0.5


def equalized(layer):
    layer.register_parameter("weight_orig", nn.Parameter(layer.weight.data))
    del layer._parameters["weight"]
    layer.register_forward_pre_hook(Equalized())
    return layer


class StyleGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.style = nn.Sequential(*(equalized(nn.Linear(4, 4)) for _ in range(2)), nn.LeakyReLU(0.2))
        self.start, self.blur = nn.Parameter(torch.randn(1, 4, 4, 4)), torch.ones(4, 1, 3, 3) / 9
        self.convs = nn.ModuleList(equalized(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2))
        self.register_buffer("kernel", self.blur)
        self.to_rgb = nn.Conv2d(4, 3, 1)

    def forward(self, codes, noise, mix=None):
        styles = [self.style(code) for code in (codes if isinstance(codes, list) else [codes])]
        x = self.start.expand(len(styles[0]), -1, -1, -1)
        for i, conv in enumerate(self.convs):
            x = Blur.apply(conv(F.interpolate(x, scale_factor=2)), self.kernel) + noise[i]
            x = F.instance_norm(x) * styles[i % len(styles)][..., None, None]
        return self.to_rgb(x)


def style_based_gan(wrap):
    generator, critic = (
        wrap(StyleGenerator()),
        wrap(nn.Sequential(equalized(nn.Conv2d(3, 4, 3, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1))),
    )
    optimizers = [torch.optim.Adam(net.parameters(), 0.01, betas=(0.0, 0.99)) for net in (generator, critic)]
    logs = []
    for step in range(3):
        real = torch.randn(5, 3, 16, 16, requires_grad=True)
        codes, noise = [torch.randn(5, 4) for _ in range(2)], [torch.randn(5, 1, 8 * 2**i, 8 * 2**i) for i in range(2)]
        fake = generator(codes, noise=noise)
        scores = critic(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-scores).mean() + slope.square().sum() / 10
        if step:  # WGAN-GP
            share = torch.rand(5, 1, 1, 1)
            mixed = (share * real.data + (1 - share) * fake.data).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = loss + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()
        for net, optimizer, value in ((critic, optimizers[1], loss), (generator, optimizers[0], None)):
            value = F.softplus(-critic(generator(codes[0], noise))).mean() if value is None else value
            net.zero_grad()
            value.backward()
            optimizer.step()
            logs.append(value.detach())
    return logs, (generator, critic)


class MemoryTransformer(nn.Module):
    """Tokens (L, N) and memories (M, N, d) per layer; `view(-1)` as in transformer-xl."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.maps = nn.ModuleList(nn.Linear(8, 24, bias=False) for _ in range(2))
        self.out = nn.Linear(8, 11)
        self.out.weight = self.table.weight

    def forward(self, data, target, *memories):
        length, batch = data.size()
        hidden = self.table(data)
        memories = memories or [hidden.new_empty(0, 0, 8)] * 2
        layers = [hidden]
        for memory, linear in zip(memories, self.maps, strict=True):
            context = hidden if not memory.numel() else torch.cat([memory, hidden], 0)
            query, key, value = torch.chunk(linear(context), 3, -1)
            query = query[-length:].contiguous().view(length, batch, 2, 4)
            key, value = (each.contiguous().view(len(context), batch, 2, 4) for each in (key, value))
            score = torch.einsum("ibnd,jbnd->ijbn", query, key)
            mask = torch.triu(torch.ones(length, len(context)), 1 + len(context) - length).bool()[..., None, None]
            weights = torch.softmax(score.masked_fill(mask, float("-inf")), 1)
            hidden = self.norm(
                hidden + torch.einsum("ijbn,jbnd->ibnd", weights, value).contiguous().view(length, batch, 8)
            )
            layers.append(hidden)
        loss = F.cross_entropy(self.out(hidden).view(-1, 11), target.view(-1), reduction="none").view(length, -1)
        with torch.no_grad():
            pairs = zip(memories, layers[:2], strict=True)
            kept = [(layer if not m.numel() else torch.cat([m, layer]))[-4:].detach() for m, layer in pairs]
        return [loss, *kept]


def transformer_xl(wrap):
    net, memories, logs = wrap(MemoryTransformer(), dim=1), (), []
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    text = torch.randint(11, (10, 5))
    for begin in (0, 3, 6):
        loss, *memories = net(text[begin : begin + 3], text[begin + 1 : begin + 4], *memories)
        optimizer.zero_grad()
        loss.float().mean().double().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        optimizer.step()
        logs += [loss.detach(), *memories]
    return logs, (net,)


def outcome(loop, gpu0_bsz):
    """Return what a loop logs, and the tensors of its networks by name; on one device if `gpu0_bsz` is "bare"."""

    def wrap(module, dim=0):
        if gpu0_bsz == "bare":
            return module
        return BalancedDataParallel(gpu0_bsz, convert_sync_batchnorm(module), ["cpu"] * 3, dim=dim)

    torch.manual_seed(3)
    logs, nets = loop(wrap)
    tensors = [{key.removeprefix("module."): value for key, value in net.state_dict().items()} for net in nets]
    return logs, {f"{i} {name}": value for i, own in enumerate(tensors) for name, value in own.items()}


@pytest.mark.parametrize("gpu0_bsz", [None, 0, 1])
@pytest.mark.parametrize("loop", [style_based_gan, transformer_xl])
def test_loop_is_that_of_one_device(loop, gpu0_bsz):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        (logs, tensors), (true_logs, truth) = (outcome(loop, each) for each in (gpu0_bsz, "bare"))
    finally:
        torch.set_default_dtype(before)
    assert relative_error(logs, true_logs) <= 1e-9
    assert tensors.keys() == truth.keys()
    for name, value in truth.items():
        assert relative_error([tensors[name]], [value]) <= 1e-8, name
