"""What a rollback goes back to. Pure."""

from collections.abc import Iterable

from capture.types import Promotion


def served_before(history: Iterable[Promotion]) -> int | None:
    """The version that was promoted before the present one; None if there is none.

    `history` is a policy's promotions, oldest first. What was rolled back from is out of it: after 3, 5 and a
    rollback to 3 the one before is what was served before 3, not 5 again.
    """
    stack: list[int] = []
    for one in history:
        if one.served_at is None:
            continue
        if not stack and one.replaced is not None:
            stack.append(one.replaced)
        if one.kind == "rollback":
            stack.pop()
            if one.version in stack:
                while stack[-1] != one.version:
                    stack.pop()
                continue
        stack.append(one.version)
    return stack[-2] if len(stack) > 1 else None
