from capture.evaluations import Evaluation, best, newest


def evaluated(version: int, reward: float, scenarios: str = "a") -> Evaluation:
    return Evaluation(version=version, scenarios=scenarios, reward=reward, rollouts=[], at=0.0)


def test_the_last_evaluation_of_a_version_counts() -> None:
    first, second = evaluated(1, 0.9), evaluated(1, 0.1)
    assert newest([first, second], 1) == {"a": second}
    assert best([first, evaluated(2, 0.5), second]) == 2


def test_the_newer_one_of_equals() -> None:
    assert best([evaluated(3, 0.5), evaluated(1, 0.5)]) == 3
    assert best([]) is None


def test_only_those_with_all_sets_of_the_last_one_compare() -> None:
    both = [
        evaluated(1, 0.2),
        evaluated(1, 0.4, "b"),
        evaluated(2, 0.9),
        evaluated(3, 0.3),
        evaluated(3, 0.2, "b"),
    ]
    assert best(both) == 1  # 0.3 against 0.25; version 2 never played b
    assert best(both[:3]) == 2  # the last one was evaluated on a alone
