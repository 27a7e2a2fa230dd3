"""How Llama may be sharded."""

from titanlite.models.plans import ATTENTION, FEED_FORWARD, decoder_plan

PLAN = decoder_plan(ATTENTION, FEED_FORWARD)
