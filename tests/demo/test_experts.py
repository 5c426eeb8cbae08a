"""Expert blocks: who is chosen, what stands in for the rest, and how the split is found."""

import numpy as np
import pytest

from strideweave.demo.batches import make_batches
from strideweave.demo.config import EncoderConfig, layer_names
from strideweave.demo.dense import gelu
from strideweave.demo.expert_fit import equal_clusters, fit_experts
from strideweave.demo.experts import BLOCKS, SHARED, ExpertRouter
from strideweave.demo.golden import load_golden

LAYERS, UNITS, HIDDEN = 2, 64, 24


def arrays(seed=4):
    rng = np.random.default_rng(seed)
    return {
        "permutations": np.stack([rng.permutation(UNITS) for _ in range(LAYERS)]),
        "routers": rng.standard_normal((LAYERS, HIDDEN + 1, BLOCKS - SHARED)).astype(np.float32),
        "means": rng.standard_normal((LAYERS, BLOCKS, HIDDEN)).astype(np.float32),
    }


@pytest.fixture
def router():
    return ExpertRouter(**arrays())


@pytest.fixture
def tokens():
    rng = np.random.default_rng(8)
    lengths = np.array([1, 5, 3])
    return rng.standard_normal((3, 5, HIDDEN)).astype(np.float32), np.arange(5) < lengths[:, None]


@pytest.mark.parametrize("k", range(5, 17))
def test_a_choice_is_the_shared_blocks_and_the_strongest_others(router, tokens, k):
    x, mask = tokens
    choice = router.choose(1, x, mask, k)
    assert choice.shape == (3, k)
    assert choice.dtype == np.int64
    weights = arrays()["routers"][1].astype(np.float64)
    for passage, own, chosen in zip(x, mask, choice, strict=True):
        guess = np.maximum(passage[own].astype(np.float64) @ weights[:-1] + weights[-1], 0)
        strength = (guess**2).sum(axis=0)
        strongest = sorted(sorted(range(12), key=lambda block: (-strength[block], block))[: k - SHARED])
        assert chosen.tolist() == [0, 1, 2, 3, *(block + SHARED for block in strongest)]


def test_padding_has_no_say(router, tokens):
    x, mask = tokens
    noisy = np.where(mask[:, :, None], x, np.float32(1e6))
    np.testing.assert_array_equal(router.choose(0, noisy, mask, 9), router.choose(0, x, mask, 9))


@pytest.mark.parametrize("k", [-1, 0, 4, 17])
def test_too_few_or_too_many_experts_are_refused(router, tokens, k):
    with pytest.raises(ValueError, match=rf"experts must be 5 to 16 .* got {k}"):
        router.choose(0, *tokens, k)


def test_units_and_fill_follow_the_choice(router):
    choice = np.array([[0, 1, 2, 3, 7], [0, 1, 2, 3, 15]])
    used, units, fill = router.used(choice), router.units(1, choice), router.fill(1, choice)
    for row, blocks in enumerate(choice):
        assert np.flatnonzero(used[row]).tolist() == blocks.tolist()
        expected = np.sort(router.permutation(1).reshape(BLOCKS, -1)[blocks].reshape(-1))
        np.testing.assert_array_equal(np.flatnonzero(units[row]), expected)
        left_out = [block for block in range(BLOCKS) if block not in blocks]
        np.testing.assert_allclose(fill[row], router.mean(1)[left_out].sum(axis=0), rtol=1e-5, atol=1e-6)


def test_all_blocks_leave_nothing_to_fill(router):
    everything = np.arange(BLOCKS)[None]
    assert router.units(0, everything).all()
    assert not router.fill(0, everything).any()


def test_a_router_survives_its_file(router, tmp_path, tokens):
    path = tmp_path / "router.npz"
    router.save(path, notes="made by a test")
    again = ExpertRouter.load(path)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(again.permutation(layer), router.permutation(layer))
        np.testing.assert_array_equal(again.mean(layer), router.mean(layer))
        np.testing.assert_array_equal(again.choose(layer, *tokens, 8), router.choose(layer, *tokens, 8))


def test_a_file_without_a_router_is_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, means=np.zeros(3))
    with pytest.raises(ValueError, match="lacks permutations, routers"):
        ExpertRouter.load(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("permutations", np.zeros((LAYERS, UNITS), np.int64), "each of the 64 hidden units once"),
        ("permutations", np.tile(np.arange(40), (LAYERS, 1)), "40 units and means"),
        ("routers", np.zeros((LAYERS, HIDDEN, 12), np.float32), "the routers have shape"),
        ("means", np.zeros((LAYERS, 12, HIDDEN), np.float32), "do not make 2 x 16 blocks"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        ExpertRouter(**(arrays() | {name: value}))


def test_a_router_for_another_model_is_refused(router):
    router.check(EncoderConfig(layers=2, hidden=24, heads=3, intermediate=64))
    with pytest.raises(
        ValueError, match=r"is for .* = \(2, 64, 24, 16\), the model has \(6, 1536, 384, 16\)"
    ):
        router.check(EncoderConfig())


def test_all_sixteen_blocks_are_the_dense_model(tiny_encoder, tiny_batches, router):
    np.testing.assert_array_equal(
        tiny_encoder.encode(tiny_batches, experts=16, router=router), tiny_encoder.encode(tiny_batches)
    )


def test_blocks_computed_one_by_one_add_up_to_the_masked_layer(tiny_encoder, tiny_batches, router):
    """What a tiled program does (chosen blocks only, then the means of the others) is what the oracle does."""
    batch = tiny_batches[-1]
    x = tiny_encoder.attend(0, tiny_encoder.embed(batch), batch.mask)
    choice = router.choose(0, x, batch.mask, 7)
    expected = tiny_encoder.feed_forward(0, x, router.units(0, choice), router.fill(0, choice))
    names = layer_names(0)
    up, up_bias = tiny_encoder.weight(names.up), tiny_encoder.weight(names.up_bias)
    down, down_bias = tiny_encoder.weight(names.down), tiny_encoder.weight(names.down_bias)
    scale, shift = tiny_encoder.weight(names.output_norm_weight), tiny_encoder.weight(names.output_norm_bias)
    blocks = router.permutation(0).reshape(BLOCKS, -1)
    for passage, chosen, wanted in zip(x, choice, expected, strict=True):
        total = down_bias + router.mean(0)[np.setdiff1d(np.arange(BLOCKS), chosen)].sum(axis=0)
        for block in chosen:
            inner = gelu(passage @ up[blocks[block]].T + up_bias[blocks[block]])
            total = total + inner @ down[:, blocks[block]].T
        out = passage + total
        out = (out - out.mean(axis=1, keepdims=True)) / out.std(axis=1, keepdims=True) * scale + shift
        np.testing.assert_allclose(out, wanted, atol=2e-5)


def test_routes_take_the_place_of_the_routers_choice(tiny_encoder, tiny_batches, router):
    class Refuses(ExpertRouter):
        def choose(self, layer, x, mask, k):
            pytest.fail("the router was asked although routes were given")

    fixed = {
        (layer, number): np.tile([0, 1, 2, 3, 9, 11], (len(batch), 1))
        for layer in range(LAYERS)
        for number, batch in enumerate(tiny_batches)
    }
    given = tiny_encoder.encode(tiny_batches, experts=6, router=Refuses(**arrays()), routes=fixed)
    own = tiny_encoder.encode(tiny_batches, experts=6, router=router)
    assert np.abs(given - own).max() > 1e-3
    np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, rtol=1e-6)


def test_a_fit_is_a_split_of_every_layer_and_the_same_each_time(tiny_encoder, tiny_batches):
    first = fit_experts(tiny_encoder, tiny_batches, seed=1)
    first.check(tiny_encoder.config)
    again = fit_experts(tiny_encoder, tiny_batches, seed=1)
    for layer in range(LAYERS):
        assert sorted(first.permutation(layer)) == list(range(UNITS))
        np.testing.assert_array_equal(first.permutation(layer), again.permutation(layer))
        np.testing.assert_array_equal(first.mean(layer), again.mean(layer))


def test_means_of_a_fit_are_the_mean_contributions(tiny_encoder, tiny_batches):
    router = fit_experts(tiny_encoder, tiny_batches)
    inner = np.concatenate(
        [
            tiny_encoder.hidden(0, tiny_encoder.attend(0, tiny_encoder.embed(batch), batch.mask))[batch.mask]
            for batch in tiny_batches
        ]
    )
    blocks = router.permutation(0).reshape(BLOCKS, -1)
    for block, mean in zip(blocks, router.mean(0), strict=True):
        expected = (inner[:, block] @ tiny_encoder.weight(layer_names(0).down)[:, block].T).mean(axis=0)
        np.testing.assert_allclose(mean, expected, atol=1e-5)


def test_the_router_of_a_fit_guesses_how_far_each_block_is_from_its_mean(tiny_encoder, tiny_batches):
    router = fit_experts(tiny_encoder, tiny_batches)
    states = [
        (tiny_encoder.attend(0, tiny_encoder.embed(batch), batch.mask), batch.mask) for batch in tiny_batches
    ]
    tokens = np.concatenate([x[mask] for x, mask in states]).astype(np.float64)
    inner = np.concatenate([tiny_encoder.hidden(0, x)[mask] for x, mask in states]).astype(np.float64)
    inner -= inner.mean(axis=0)
    down = tiny_encoder.weight(layer_names(0).down)
    inputs = np.hstack([tokens, np.ones((len(tokens), 1))])
    ridge = (
        np.sqrt(1e-3 * len(tokens)) * np.eye(*inputs.shape[1:] * 2)[:-1]
    )  # as rows that ask for weights of 0
    for number, block in enumerate(router.permutation(0).reshape(BLOCKS, -1)[SHARED:]):
        distance = np.linalg.norm(inner[:, block] @ down[:, block].T, axis=1)
        wanted = np.concatenate([distance, np.zeros(len(ridge))])
        best, *_ = np.linalg.lstsq(np.vstack([inputs, ridge]), wanted, rcond=None)
        np.testing.assert_allclose(router.router(0)[:, number], best, atol=1e-4)


def test_clusters_are_equal_and_find_what_belongs_together():
    rng = np.random.default_rng(6)
    groups = rng.permutation(np.repeat(np.arange(5), 8))
    directions = np.linalg.qr(rng.standard_normal((12, 5)))[0].T
    points = directions[groups] + 0.05 * rng.standard_normal((40, 12))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    found = equal_clusters(points, 5, np.random.default_rng(0))
    assert len({(group, number) for group, number in zip(groups, found, strict=True)}) == 5


def test_clusters_stay_equal_where_the_points_are_not():
    points = np.ones((12, 3), np.float32) / np.float32(3**0.5)
    points[0] = [1, 0, 0]
    found = equal_clusters(points, 3, np.random.default_rng(0))
    assert np.bincount(found).tolist() == [4, 4, 4]


def test_the_bundled_router_fits_the_model():
    router = ExpertRouter.load()
    router.check(EncoderConfig())
    assert router.permutation(0).shape == (1536,)
    assert router.mean(5).shape == (16, 384)


def test_the_real_model_routed_is_exact_at_sixteen_and_close_below(real_encoder, tokenizer):
    router = ExpertRouter.load()
    batches = make_batches(load_golden().sentences[:16], tokenizer, 8)
    dense = real_encoder.encode(batches)
    cosine = {
        k: (real_encoder.encode(batches, experts=k, router=router) * dense).sum(axis=1).mean()
        for k in (16, 12, 8)
    }
    assert cosine[16] == pytest.approx(1, abs=1e-6)
    assert cosine[12] > 0.85
    assert 0.7 < cosine[8] < cosine[12] < 0.999  # an approximation, and not to be sold as the same model


def test_the_real_router_beats_a_fixed_choice(real_encoder, tokenizer):
    """Routing is more than pruning: the same number of blocks, chosen once for all, does worse."""
    router = ExpertRouter.load()
    batches = make_batches(load_golden().sentences[:16], tokenizer, 8)
    dense = real_encoder.encode(batches)
    fixed = {
        (layer, number): np.tile(np.arange(8), (len(batch), 1))
        for layer in range(real_encoder.config.layers)
        for number, batch in enumerate(batches)
    }
    routed = (real_encoder.encode(batches, experts=8, router=router) * dense).sum(axis=1).mean()
    static = (real_encoder.encode(batches, experts=8, router=router, routes=fixed) * dense).sum(axis=1).mean()
    assert routed > static
