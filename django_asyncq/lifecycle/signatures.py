"""Sign what the package leaves in Redis and trusts later. Write access to Redis is not enough to make one.

The key is the project's SECRET_KEY. Like Django's own signatures, these are also accepted when they were made with one
of SECRET_KEY_FALLBACKS, so that keys can be rotated while tasks run.
"""

from __future__ import annotations

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.crypto import constant_time_compare, salted_hmac

# Each purpose has a salt of its own, so that a signature made for one is worth nothing for another.
SALT = "django_asyncq."
ALGORITHM = "sha256"
SIGNATURE_BYTES = 64


def can_sign() -> bool:
    """Return whether the project has a SECRET_KEY; Django raises when it is empty."""
    try:
        return bool(settings.SECRET_KEY)
    except ImproperlyConfigured:
        return False


def sign(purpose: str, message: bytes) -> bytes:
    """Return the signature of a message: 64 hexadecimal digits.

    Raises: django.core.exceptions.ImproperlyConfigured without a SECRET_KEY; see `can_sign`.
    """
    return salted_hmac(SALT + purpose, message, algorithm=ALGORITHM).hexdigest().encode()


def is_genuine(purpose: str, message: bytes, signature: bytes) -> bool:
    """Return whether a signature was made with the SECRET_KEY or with one of the SECRET_KEY_FALLBACKS."""
    if not can_sign():
        return False
    # An empty fallback would be a key that everybody knows.
    for secret in (settings.SECRET_KEY, *[key for key in settings.SECRET_KEY_FALLBACKS if key]):
        expected = salted_hmac(SALT + purpose, message, secret=secret, algorithm=ALGORITHM).hexdigest()
        if constant_time_compare(signature, expected.encode()):
            return True
    return False
