"""Classes that callers start as Ray actors or make in their own process, and calls that reach either."""

from collections.abc import Callable
from typing import Any


class ActorClass:
    """Gives a class `remote(...)` and `options(...)`, as `ray.remote` does, beside its constructor."""

    @classmethod
    def remote(cls, *args: Any, **options: Any) -> Any:
        """Start an actor; its methods are called by `actor.method.remote(...)`."""
        return cls.options().remote(*args, **options)

    @classmethod
    def options(cls, **options: Any) -> Any:
        """Return what starts an actor with Ray's options, such as `num_cpus`."""
        import ray  # noqa: PLC0415

        plain = type(
            cls.__name__, tuple(base for base in cls.__bases__ if base is not ActorClass), dict(cls.__dict__)
        )
        return ray.remote(plain).options(**options) if options else ray.remote(plain)


def call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what a method returns, of an object in this process or of an actor."""
    remote = getattr(method, "remote", None)
    return method(*args, **options) if remote is None else remote(*args, **options).future().result()
