// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), the checksum of a subgroup on its path.
#pragma once

#include <cstdint>

namespace mlp_offload::io {

// Checksum of nbytes at data; `initial` is the checksum of what came before, 0 at the start.
// SSE4.2 with three interleaved streams where the processor has it, else crc32c_portable.
uint32_t crc32c(const void* data, uint64_t nbytes, uint32_t initial = 0);

// The same value from tables alone, on any processor.
uint32_t crc32c_portable(const void* data, uint64_t nbytes, uint32_t initial = 0);

// Checksum of A followed by B, from both checksums and the length of B, without touching the data.
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t nbytes_b);

}  // namespace mlp_offload::io
