import pytest

from dora.tasks.episode import Episode, extend


def test_only_what_the_policy_sampled_is_trained_over_several_turns():
    episode = extend(Episode(), [5, 6], sampled=False)
    episode = extend(episode, [7, 8, 9], sampled=True)
    episode = extend(episode, [1], sampled=False)
    episode = extend(episode, [2], sampled=True)
    assert episode == Episode(tokens=(5, 6, 7, 8, 9, 1, 2), loss_mask=(0, 0, 1, 1, 1, 0, 1))


def test_tokens_without_a_mask_entry_are_refused():
    with pytest.raises(ValueError, match="2 tokens need as many mask entries, got 1"):
        Episode(tokens=(1, 2), loss_mask=(0,))
