"""What a converted model says of the conversion that made it.

Law: a converted model of any library names the plan, the policy and the original that it was
made of, and is not converted again. A conversion rounds constants and replaces ops; what was
lost is in the original alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Self

from finecast.errors import ModelError
from finecast.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The conversion that made a model. The fields' names are the keys of a model's notes.

    Attributes:
        policy: The label of the policy that the plan was made under.
        original: The name of the original's file, without folders; empty if it had none.
        original_digest: The digest of the original, as its plans state it; models that
            earlier releases converted do not have it.
    """

    plan: str
    policy: str
    original: str = ""
    original_digest: str = ""

    @classmethod
    def of(cls, plan: Plan, name: str) -> Self:
        """That of a model that ``plan`` gives, of the original in the file ``name``."""
        return cls(
            plan=plan.digest,
            policy=plan.policy,
            original=PurePath(name).name,
            original_digest=plan.model,
        )

    @classmethod
    def read(cls, notes: Mapping[str, str]) -> Self | None:
        """That in the notes of a model; None if finecast did not convert it."""
        if not notes.get("policy"):
            return None
        return cls(**{name: notes.get(name, "") for name in cls.__slots__})

    @property
    def notes(self) -> dict[str, str]:
        """The notes that a model is written with."""
        stated = {name: getattr(self, name) for name in type(self).__slots__}
        return {name: text for name, text in stated.items() if text}

    def refusal(self, where: str) -> ModelError:
        """The error that says that the model ``where`` is not converted again."""
        named = self.original or "the model that it was made of"
        digest = f", digest {self.original_digest}" if self.original_digest else ""
        return ModelError(
            f"it was converted by finecast before, to {self.policy}, and a"
            " conversion is not undone: constants are rounded and ops replaced",
            where=where,
            fix=f"give the original: {named}{digest}",
        )
