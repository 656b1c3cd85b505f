"""Hugging Face transformers: a mixin with which a ``Trainer`` loads data by shmloader's engine."""

from typing import Any

from shmloader.installing import InstallOptions, installed


class LoaderMixin:
    """Makes a ``transformers.Trainer`` use shmloader: ``class MyTrainer(LoaderMixin, Trainer)``.

    The Trainer creates its loaders itself, of torch's class. While it trains, evaluates or
    predicts, these loaders run on shmloader's engine. So do the loaders that it makes to resume in
    the middle of an epoch.

    Attributes:
        loader_options: The arguments of :func:`shmloader.install`. Set them in the subclass or on
            the object.
    """

    loader_options: InstallOptions = {}  # noqa: RUF012 - a TypedDict cannot be frozen

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's ``train``, on shmloader's engine."""
        with installed(**self.loader_options):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's ``evaluate``, on shmloader's engine."""
        with installed(**self.loader_options):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's ``predict``, on shmloader's engine."""
        with installed(**self.loader_options):
            return super().predict(*args, **kwargs)  # type: ignore[misc]
