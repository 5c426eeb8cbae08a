"""A policy that remembers what it has decided serves one carrier: whom, and until when."""

from __future__ import annotations

import weakref

from strideweave.runtime.locks import short_lock
from strideweave.runtime.uncopied import Uncopied

__all__ = ["OneCarrier", "begin_serving", "end_serving"]


class OneCarrier(Uncopied):
    """The base of what serves one carrier at a time.

    The carrier is held weakly: one that is dropped without a word does not keep the policy, nor the policy it.
    """

    _instead = "it serves one carrier: make another one"

    _served: weakref.ref[object] | None = None

    def _require_free(self, carrier: object = None) -> None:
        """Refuse to serve a carrier, or one that is about to be made, beside another.

        Raises:
            ValueError: another is served, and neither released nor gone.
        """
        served = None if self._served is None else self._served()
        if served is not None and served is not carrier:
            raise ValueError(
                f"{self!r} serves {served!r}, whose tiles it would take for those of another carrier; make one "
                "policy for each, or release that carrier first"
            )

    def _begin_serving(self, carrier: object) -> None:
        """Serve this carrier from now on; ValueError while another is served."""
        with short_lock:
            self._require_free(carrier)
            self._served = weakref.ref(carrier)

    def _end_serving(self, carrier: object) -> None:
        """The carrier was released; does nothing where another is served."""
        with short_lock:
            if self._served is not None and self._served() is carrier:
                self._served = None


def begin_serving(policy: object, carrier: object) -> None:
    """Tell a policy, if it serves one carrier only, that it is this one.

    Raises:
        ValueError: it serves another, which is neither released nor gone.
    """
    if isinstance(policy, OneCarrier):
        policy._begin_serving(carrier)


def end_serving(policy: object, carrier: object) -> None:
    """Tell a policy that its carrier was released; it may serve another from now on."""
    if isinstance(policy, OneCarrier):
        policy._end_serving(carrier)
