"""Hugging Face: a mixin by which a ``Trainer`` loads by shmloader, with arguments of its own."""

from typing import Any

from shmloader.installing import InstallOptions, installed


class LoaderMixin:
    """Makes a ``transformers.Trainer`` load by shmloader: ``class Mine(LoaderMixin, Trainer)``.

    The Trainer creates its loaders itself, of torch's class. While it trains, evaluates or
    predicts, these run on shmloader's engine, and so do those by which it resumes in the middle of
    an epoch.

    Attributes:
        loader_options: The arguments of :func:`shmloader.install`. Set them in the subclass or on
            the object.
    """

    loader_options: InstallOptions = {}  # noqa: RUF012 - a TypedDict cannot be frozen

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        with installed(**self.loader_options):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does."""
        with installed(**self.loader_options):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as the Trainer does."""
        with installed(**self.loader_options):
            return super().predict(*args, **kwargs)  # type: ignore[misc]
