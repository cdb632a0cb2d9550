"""Tells the host which blocks to leave out."""

import torch

from gpu.methods.device_side import RingSide
from transfer.partial import Owner
from transfer.tier_shape import BLOCK_TOKENS

EVEN_BLOCKS = 0x55555555


def make_ring_side(settings, site, num_rings):
    return AlternateSide(settings, site)


class AlternateSide(RingSide):
    def __init__(self, settings, site):
        super().__init__(site)
        odd = ~EVEN_BLOCKS & 0xFFFFFFFF
        self.bits = torch.tensor(odd if settings.first else EVEN_BLOCKS).int()
        self.first = settings.first
        self.words, self.kv_heads = site.exclusion_words, site.architecture.num_kv_heads
        self.group = site.architecture.group
        self.counted_layer = site.tier_shape.layers[0]
        self.of_slot = torch.zeros(site.max_running + 1, dtype=torch.int64, device=site.device)
        self.num_blocks = torch.zeros(2, dtype=torch.int64, device=site.device)
        is_cuda = site.device.type == "cuda"  # on the host, to read without waiting
        self.told_of_slot = torch.zeros(len(self.of_slot), dtype=torch.int64, pin_memory=is_cuda)
        self.told_blocks = torch.zeros(2, dtype=torch.int64, pin_memory=is_cuda)

    def before(self, reads):
        if not reads.reads_host:
            return
        own = (reads.rows.of_slots(self.ring_of_slot) >= 0)[:, None, None]
        bits = torch.where(own, self.bits, 0).expand(-1, self.kv_heads, self.words).contiguous()
        reads.excluded = bits if reads.excluded is None else reads.excluded | bits
        blocks = self.blocks_of(reads.rows)
        self.num_blocks += torch.stack([blocks.sum(), self.skipped(blocks).sum()])
        if reads.layer == self.counted_layer:
            self.of_slot.index_add_(0, reads.rows.slots.long() % len(self.of_slot), self.skipped(blocks).long())

    def blocks_of(self, rows):
        held = rows.of_slots(self.ring_of_slot) >= 0
        return torch.where(held, (rows.skips[1] - rows.skips[0]) // BLOCK_TOKENS, 0)

    def skipped(self, blocks):
        return (blocks + 1 - self.first) // 2

    def end_step(self):
        self.told_blocks.copy_(self.num_blocks, non_blocking=True)
        self.told_of_slot.copy_(self.of_slot, non_blocking=True)

    def counts(self):
        blocks, skipped = self.told_blocks.tolist()
        return {"alternate_blocks": [blocks], "alternate_skipped_blocks": [skipped]}

    def assign(self, write):
        super().assign(write)
        self.of_slot[write.slot] = 0
        self.told_of_slot[write.slot] = 0

    def figures_of(self, slot):
        return {"skipped_blocks": int(self.told_of_slot[slot])}

    def covered(self, reads):
        if not reads.reads_host:
            return {}
        tokens = BLOCK_TOKENS * self.skipped(self.blocks_of(reads.rows))
        return {Owner.DROPPED: tokens[:, None].expand(-1, self.kv_heads * self.group).int()}
