"""The formats of low precision: what must hold of every number, not of examples."""

from __future__ import annotations

import itertools
import math

import formats_in_cpp
import numpy as np
import pytest
import torch
from torch import Tensor

import compiled_optim as co
from compiled_optim.rule import formats
from compiled_optim.rule.formats import GROUP, broadcast
from compiled_optim.rule.storage import joined, parts_of

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INF, NAN = float("inf"), float("nan")

# Exponents of float32 where a dtype begins or ends: subnormal numbers, the smallest normal one, 1, the largest, infinity.
EDGES = {"bfloat16": (0, 1, 127, 254, 255), "float16": (0, 102, 112, 113, 142, 143)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_their_rests_at_every_exponent(dtype: str) -> None:
    """Run the module itself for all numbers between as well."""
    assert formats_in_cpp.violations(dtype, stride=509) == {}


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_their_rests_with_every_mantissa(dtype: str) -> None:
    for exponent in EDGES[dtype]:
        for sign in (0, 1 << 31):
            first = sign + (exponent << 23)
            assert formats_in_cpp.violations(dtype, first=first, stop=first + (1 << 23), stride=3) == {}, exponent


def floats(count: int, seed: int = 0) -> Tensor:
    """Random bits as float32, zeros of both signs, infinities and NaN among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    values = torch.from_numpy(bits.view(np.float32).copy())
    values[:6] = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0])
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest_bits", [8, 16])
def test_tensors_and_generated_code_agree(dtype: str, rest_bits: int) -> None:
    values = floats(1 << 16)
    param, rest = formats.split(values, dtype, rest_bits)
    again = formats.joined(param, rest, dtype, rest_bits)
    code = formats_in_cpp.through(dtype, rest_bits, values)
    for ours, theirs in zip((param, rest.float(), again), code, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rests_rounded_at_random_are_one_of_two_neighbours(dtype: str) -> None:
    """And right on average; what fits stays."""
    values = 1 + 7 * torch.rand(1 << 12, generator=torch.Generator().manual_seed(0))
    unit = 2.0 ** (values.log2().floor()) * torch.finfo(DTYPES[dtype]).eps / 256
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(1, 401):
        noise = formats.parts_in(formats.threshold_of(torch.tensor(float(step), dtype=torch.float64), 3.0).float(), 24)
        param, rest = formats.split(values, dtype, 8, noise)
        assert torch.equal(rest, rest.to(torch.int8).int())
        found = formats.joined(param, rest, dtype, 8)
        assert ((found - values).abs() < unit).all()
        again = formats.split(found, dtype, 8, noise)
        assert torch.equal(again[0], param)
        assert torch.equal(again[1], rest)
        total += found - values
    assert (total.abs() / 400 <= 0.02 * unit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["kahan", "split8", "split16", "master"])
@pytest.mark.parametrize("written", [0.0, INF, -INF, NAN, 1000.0, -3.0], ids=str)
def test_what_somebody_writes_into_a_parameter_counts(dtype: str, mode: str, written: float) -> None:
    """Whatever is beside it from earlier: within half a unit in its last place."""
    before = torch.tensor([1.0019, -1.0019, 3e4 + 7, 1e-3, -0.0039], dtype=torch.float32)
    parts = _parts_of(before, mode, dtype)
    param = torch.full_like(before, written)
    found = joined(param, parts, mode, dtype)
    if not math.isfinite(written):
        torch.testing.assert_close(found, param, rtol=0, atol=0, equal_nan=True)
        return
    half = 0.5 * torch.finfo(DTYPES[dtype]).eps * max(2.0 ** math.floor(math.log2(abs(written) or 1e-38)), _least(dtype))
    assert ((found - param).abs() <= half).all()


def _least(dtype: str) -> float:
    return torch.finfo(DTYPES[dtype]).smallest_normal


def _parts_of(value: Tensor, mode: str, dtype: str) -> dict[str, Tensor]:
    parts = parts_of(value, {}, mode, dtype)
    if "kahan_comp" in parts:
        parts["kahan_comp"] = parts["kahan_comp"].to(DTYPES[dtype]).float()
    return parts


class TestCodes:
    """The codes of state in 8 bits, of groups whose largest magnitudes are all of float32's."""

    LEVELS = {"signed": range(-127, 128), "unsigned": range(256)}

    @staticmethod
    def scales() -> Tensor:
        bits = torch.arange(formats._SMALLEST, 0x7F800000, 40009, dtype=torch.int32)  # all exponents from 2**-100
        return bits.view(torch.float32)

    @pytest.mark.parametrize("kind", LEVELS)
    def test_every_code_of_every_scale_is_itself_again(self, kind: str) -> None:
        scales, codes = self.scales(), torch.tensor(self.LEVELS[kind], dtype=torch.float32)
        top = codes.abs().max()
        for some in codes.split(GROUP - 1):
            group = torch.cat([top[None], some, some.new_zeros(GROUP - 1 - len(some))]).repeat(len(scales))
            values = formats.decoded(group, scales, kind)
            again = formats.scale_of(values)
            assert torch.equal(again, scales)
            assert torch.equal(formats.encoded(values, again, kind).float(), group)

    @pytest.mark.parametrize("kind", LEVELS)
    def test_codes_rise_with_values(self, kind: str) -> None:
        codes = torch.tensor(self.LEVELS[kind], dtype=torch.float32)
        codes = torch.cat([codes, codes[-1].repeat(-len(codes) % GROUP)])
        for scale in self.scales()[::997].tolist():
            values = formats.decoded(codes, torch.full((len(codes) // GROUP,), scale), kind)
            assert all(a < b for a, b in itertools.pairwise(values[: len(self.LEVELS[kind])].tolist()))

    def test_errors_of_squares_are_within_half_a_level_of_the_root(self) -> None:
        """And so, relative to the value, within one over its code."""
        values, scale, codes, found = self.random_values("unsigned")
        steps = (values.sqrt() - found.sqrt()).abs() / broadcast(scale).sqrt() * 255
        assert steps[codes > 1].max() <= 0.5001
        assert steps.max() <= 1  # the least is 1

    def test_errors_of_signed_numbers_are_within_a_64th(self) -> None:
        """Of the number and a sixteenth of the scale, or less."""
        values, scale, _, found = self.random_values("signed")
        parts = values.double().abs() / broadcast(scale)
        errors = (values.double() - found).abs() / broadcast(scale)
        assert (errors <= (parts + 0.06875) / 64 + 1e-6).all()
        assert errors[parts < 0.05].max() <= 2**-4 / 64 + 1e-6
        assert ((found == 0) | (found.sign() == values.sign())).all()

    @staticmethod
    def random_values(kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers of many sizes, their scales, their codes, and what these stand for."""
        values = torch.randn(GROUP * 4096, generator=torch.Generator().manual_seed(0)) ** 3
        values = values if kind == "signed" else values.abs()
        scale = formats.scale_of(values)
        assert torch.equal(scale, values.abs().view(-1, GROUP).amax(-1))
        codes = formats.encoded(values, scale, kind)
        return values, scale, codes, formats.decoded(codes, scale, kind)

    def test_positive_numbers_stay_positive(self) -> None:
        tiny = torch.tensor([2.0**-149, 2.0**-126, 1e-30, 1e-12])
        values = torch.cat([tiny, torch.tensor([1.0]), torch.zeros(GROUP - 5), tiny, torch.zeros(GROUP - 4)])
        for some in (values, values[GROUP:].clamp(max=2.0**-149)):
            scale = formats.scale_of(some)
            assert torch.equal(formats.decoded(formats.encoded(some, scale, "unsigned"), scale, "unsigned") > 0, some > 0)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
    @pytest.mark.parametrize("kind", LEVELS)
    def test_what_is_not_finite_is_seen_and_stays_in_its_group(self, kind: str, bad: float) -> None:
        values = torch.ones(2 * GROUP)
        values[3] = bad
        scale = formats.scale_of(values)
        codes = formats.encoded(values, scale, kind).to(torch.uint8 if kind == "unsigned" else torch.int8).float()
        found = formats.decoded(codes, scale, kind)
        assert not found[:GROUP].isfinite().any()
        assert torch.equal(found[GROUP:], values[GROUP:])

    def test_zeros_have_no_scale(self) -> None:
        scale = formats.scale_of(torch.zeros(GROUP))
        assert scale.tolist() == [0.0]
        assert formats.encoded(torch.zeros(GROUP), scale, "signed").any().item() is False

    @pytest.mark.parametrize("shrinks", [1.0, 0.1])
    def test_a_slow_average_follows_what_it_averages(self, shrinks: float) -> None:
        """Down too: an average that lost each step of 0.1 % to rounding would keep the size of the first gradients.

        With a scale of 8 bits that is rounded up, 4000 steps after gradients shrink to a tenth it was 28 times too large.
        """
        generator = torch.Generator().manual_seed(0)
        average, exact = torch.zeros(GROUP * 64), torch.zeros(GROUP * 64)
        for step in range(4000):
            squares = torch.randn(average.shape, generator=generator).square() * (1 if step < 1000 else shrinks**2)
            exact = 0.999 * exact + 0.001 * squares
            average = 0.999 * average + 0.001 * squares
            scale = formats.scale_of(average)
            average = formats.decoded(formats.encoded(average, scale, "unsigned"), scale, "unsigned")
        assert (average / exact).median() == pytest.approx(1, abs=0.1)

    def test_averages_fall_beside_others_that_stay(self) -> None:
        """With the thresholds of each step, on average over tensors: those of one tensor are rounded alike, 1.5 % apart.

        To nearest, the roots of such averages were 3.8 times too large.
        """
        generator, seeds = torch.Generator().manual_seed(0), torch.arange(16, dtype=torch.float64)[:, None]
        average, exact = torch.zeros(16, GROUP * 4), torch.zeros(16, GROUP * 4)
        sizes = torch.ones(GROUP * 4)
        for step in range(4000):
            sizes[::2] = 1 if step < 1000 else 0.01
            squares = torch.randn(average.shape, generator=generator).square() * sizes
            exact = 0.999 * exact + 0.001 * squares
            average = 0.999 * average + 0.001 * squares
            scale = formats.scale_of(average)
            threshold = formats.threshold_of(torch.tensor(float(step), dtype=torch.float64), seeds).float()
            average = formats.decoded(formats.encoded(average, scale, "unsigned", threshold), scale, "unsigned")
        roots = (average / exact).sqrt()
        assert roots[:, ::2].median(1).values.mean() == pytest.approx(1, abs=0.05)
        assert roots[:, 1::2].median() == pytest.approx(1, abs=0.01)

    def test_momentum_ends_beside_others_that_goes_on(self) -> None:
        """With the threshold of each step. To nearest, a hundredth of the scale would stay for ever."""
        average, grads = torch.zeros(GROUP), torch.ones(GROUP)
        for step in range(3000):
            grads[::2] = 1 if step < 500 else 0
            average = 0.99 * average + 0.01 * grads
            scale = formats.scale_of(average)
            threshold = formats.threshold_of(torch.tensor(float(step), dtype=torch.float64), 5.0).float()
            average = formats.decoded(formats.encoded(average, scale, "signed", threshold), scale, "signed")
        assert not average[::2].any()
        assert average[1::2].mean() == pytest.approx(1, abs=0.02)


class TestNoise:
    """Stochastic rounding: random, without bias, and the same everywhere."""

    @staticmethod
    def bits(step: int, seed: int = 0, count: int = 1 << 14) -> Tensor:
        key = formats.key_of(torch.tensor(float(step), dtype=torch.float64), float(seed))
        return formats.noise_of(key.float(), torch.arange(count, dtype=torch.int32)).double() / (1 << 24)

    def test_it_is_uniform(self) -> None:
        for step, seed in ((1, 0), (2, 0), (1000, 0), (1, 1), (123456, 77), (1, (1 << 24) - 1)):
            noise = self.bits(step, seed)
            counts = torch.histc(noise, 64, 0, 1)
            expected = len(noise) / 64
            chi_square = ((counts - expected) ** 2 / expected).sum().item()
            assert chi_square < 63 + 5 * math.sqrt(2 * 63), (step, seed)
            for low in (8, 15):  # bits by themselves too, which decide what is nearest
                share = ((noise * (1 << 24)).long() >> low & 1).double().mean().item()
                assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(noise)), (step, seed, low)

    @pytest.mark.parametrize("others", [(2, 0), (3, 0), (1001, 0), (1, 1), (1, 2), (1, 4096)], ids=str)
    def test_other_steps_and_seeds_have_nothing_to_do_with_it(self, others: tuple[int, int]) -> None:
        mine, theirs = self.bits(1), self.bits(*others)
        for shift in (0, 1, 64, 4096):
            assert abs(_correlation(mine, theirs.roll(shift))) < 5 / math.sqrt(len(mine)), shift
        assert (mine == theirs).double().mean() < 1e-3

    def test_no_two_steps_or_seeds_have_the_same_numbers_in_another_order(self) -> None:
        blocks: dict[tuple[float, ...], tuple[int, int]] = {}
        for drawn in itertools.product(range(1, 6), (0, 1, 2, 3, 4096)):
            for block in self.bits(*drawn).view(-1, 128).sort().values[:, :8].tolist():
                assert blocks.setdefault(tuple(block), drawn) == drawn

    def test_elements_have_nothing_to_do_with_each_other(self) -> None:
        noise = self.bits(5)
        for shift in (1, 2, 3, 64, 128, 768, 4096):
            assert abs(_correlation(noise, noise.roll(shift))) < 5 / math.sqrt(len(noise)), shift

    def test_an_element_has_other_noise_in_every_step(self) -> None:
        noise = torch.stack([self.bits(step, count=64) for step in range(1, 2001)])
        for shift in (1, 2, 7, 100):
            for element in (0, 1, 63):
                column = noise[:, element]
                assert abs(_correlation(column, column.roll(shift))) < 5 / math.sqrt(len(column))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rounding_has_no_bias(self, dtype: str) -> None:
        """Within 3 standard errors, for shares of a unit from nothing to all of it."""
        unit = torch.finfo(DTYPES[dtype]).eps
        for share in (0.0, 0.01, 0.25, 0.5, 0.9, 1.0):
            for size in (1.0, -1.0, 0.01, -300.0):
                value = torch.full((1 << 14,), size * (1 + share * unit))
                noise = formats.noise_of(torch.tensor(share * 1000 // 1 + 7), torch.arange(len(value), dtype=torch.int32))
                rounded = formats.randomly_rounded(value, noise, dtype)
                assert torch.equal(rounded, rounded.to(DTYPES[dtype]).float())
                errors = (rounded - value).double()
                assert errors.mean().abs() <= 3 * errors.std() / math.sqrt(len(value)) + 1e-9 * abs(size), (share, size)
                assert errors.abs().max() < abs(size) * 2 * unit

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_not_finite_stays(self, dtype: str) -> None:
        noise = torch.full((4,), (1 << 24) - 1, dtype=torch.int32)
        found = formats.randomly_rounded(torch.tensor([NAN, INF, -INF, 3.4e38]), noise, dtype)
        torch.testing.assert_close(found, torch.tensor([NAN, INF, -INF, INF]), rtol=0, atol=0, equal_nan=True)


def _correlation(x: Tensor, y: Tensor) -> float:
    return torch.corrcoef(torch.stack([x, y]))[0, 1].item()


@pytest.mark.parametrize("lowering", ["multi_tensor"])
@pytest.mark.parametrize("mode", ["stochastic", "kahan", "split8"])
def test_rounding_at_random_is_that_of_the_eager_lowering(mode: str, lowering: str) -> None:
    results = []
    for name in (lowering, "eager"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((64, 70), (4099,))]
        made = co.SGD(params, lr=1e-3, weights=mode, rounding_seed=5, lowering=name)
        for step in range(5):
            for param in params:
                param.grad = torch.full_like(param, 0.01 * (step + 1))
            made.step()
        results.append([tensor.detach().clone() for param in params for tensor in (param, *made.state[param].values())])
    assert all(map(torch.equal, *results))
