"""axolotl: a plug-in whose jobs share sequences by ring attention, `ringattn.integrations.axolotl.RingPlugin`."""

from ringattn.integrations.axolotl.plugin import RingArgs, RingAxolotlTrainer, RingPlugin

__all__ = ["RingArgs", "RingAxolotlTrainer", "RingPlugin"]
