"""Whether the operators run here and how, what keeps them from it, and what to type.

Nothing but the standard library is imported, torch not even where it is there: what is broken is
looked at from outside.
"""

from __future__ import annotations
