"""A matter that a check judges, and the words for it: good, odd, bad, skipped, unknown."""

from dataclasses import dataclass, replace

from gpuwatch.verify import Cause, Finding, Verdict


@dataclass(frozen=True, slots=True)
class Matter:
    """What is judged: of which check and entity, and what is known of it. See `verify.Finding`."""

    name: str
    entity: str
    measure: str = ""
    unit: str = ""
    value: float | str | None = None
    expectation: float | str | None = None
    source: str = ""
    noise: float | None = None
    thumb: bool = False

    def by_thumb(self) -> "Matter":
        """Return it as one of those that rules of thumb of the trade are about."""
        return replace(self, thumb=True)

    def seen(
        self,
        value: float | str | None,
        expectation: float | str | None = None,
        source: str = "",
    ) -> "Matter":
        """Return it with what was seen, what should be, and who says so."""
        return replace(self, value=value, expectation=expectation, source=source)

    def good(self, reason: str = "") -> Finding:
        """Find that all is well."""
        return self._found("PASS", reason)

    def odd(self, reason: str, cause: Cause, next_step: str) -> Finding:
        """Find that something is not as it should be, which a node may live with."""
        return self._found("WARN", reason, cause, next_step)

    def bad(self, reason: str, cause: Cause, next_step: str) -> Finding:
        """Find that something is wrong."""
        return self._found("FAIL", reason, cause, next_step)

    def judged(self, fault: str, cause: Cause, next_step: str, *, fatal: bool = False) -> Finding:
        """Find that all is well, or what is wrong if something is."""
        if not fault:
            return self.good()
        return self.bad(fault, cause, next_step) if fatal else self.odd(fault, cause, next_step)

    def skipped(self, reason: str, next_step: str, cause: Cause = "") -> Finding:
        """Find that there is nothing to judge, or nothing to judge by."""
        return self._found("SKIP", reason, cause, next_step)

    def unknown(self, reason: str, cause: Cause, next_step: str) -> Finding:
        """Find that nobody can tell."""
        return self._found("UNKNOWN", reason, cause, next_step)

    def unread(self, what: str) -> Finding:
        """Find that the driver does not tell what it should."""
        step = "update the driver, or look at the GPU from the host instead of a container"
        return self.unknown(f"the driver does not tell {what}", "driver", step)

    def unknown_model(self, name: str, what: str) -> Finding:
        """Find that nobody has told what a card of this name should have."""
        reason = f"{name!r} is no known model: what it should have of {what} is not known"
        step = "compare with its data sheet; `gpuwatch verify --save` keeps what this host gives as"
        return self.unknown(reason, "", f"{step} its baseline")

    def _found(
        self,
        verdict: Verdict,
        reason: str = "",
        cause: Cause = "",
        next_step: str = "",
    ) -> Finding:
        return Finding(
            name=self.name,
            entity=self.entity,
            verdict=verdict,
            measure=self.measure,
            unit=self.unit,
            value=self.value,
            expectation=self.expectation,
            source=self.source,
            noise=self.noise,
            reason=reason,
            cause=cause,
            next_step=next_step,
            thumb=self.thumb,
        )
