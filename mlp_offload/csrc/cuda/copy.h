// Pieces of memory gathered, scattered and cast in one launch, with an eye on inf and nan.
#pragma once

#include "cuda/element.h"

namespace mlp_offload::cuda {

// A row of the pieces array: `numel` elements from one address to another, rounded to nearest even where to_dtype is
// narrower, bit for bit where both dtypes are the same.
struct Piece {
  std::int64_t from_address, to_address, numel, from_dtype, to_dtype;
};
constexpr int kPieceColumnCount = 5;
static_assert(sizeof(Piece) == kPieceColumnCount * sizeof(std::int64_t), "a row is read as one Piece");

namespace {

struct CopyRow {
  const void* from;
  void* to;
  std::int64_t numel;
  unsigned first_block;
  std::int16_t from_dtype, to_dtype;
};

__device__ inline unsigned past_of(const void* to, int dtype) {
  return elements_past(reinterpret_cast<std::uintptr_t>(to), dtype == kFp32 ? 4 : 2);
}

// True when an element read is inf or nan.
template <class From>
__device__ inline bool copy_quad(const CopyRow& row, const Quad& quad) {
  From raw[4] = {};
  load(raw, static_cast<const From*>(row.from) + quad.first, quad.count);
  float wide[4];
  bool non_finite = false;
  for (int i = 0; i != 4; ++i) {
    wide[i] = Rounded::load(raw + i);
    non_finite |= (adam::bits_of(wide[i]) & 0x7f800000u) == 0x7f800000u;
  }
  if (row.from_dtype == row.to_dtype) {
    store(static_cast<From*>(row.to) + quad.first, raw, quad.count);
  } else {
    store_as(row.to_dtype, row.to, wide, quad.first, quad.count);
  }
  return non_finite;
}

__global__ void __launch_bounds__(kThreads)
    copy_pieces(const Batch<CopyRow> __grid_constant__ batch, float* found_non_finite) {
  const CopyRow& row = row_of_block(batch);
  const unsigned past = past_of(row.to, row.to_dtype);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x - row.first_block) * kTileQuads + threadIdx.x;
  bool non_finite = false;
  for (unsigned i = 0; i != kQuadsPerThread; ++i) {
    const Quad quad(begin + i * kThreads, past, row.numel);
    if (quad.count <= 0) continue;
    if (row.from_dtype == kFp32) non_finite |= copy_quad<float>(row, quad);
    if (row.from_dtype == kBf16) non_finite |= copy_quad<Bf16>(row, quad);
    if (row.from_dtype == kFp16) non_finite |= copy_quad<Fp16>(row, quad);
  }
  // All who write, write the same.
  if (non_finite && found_non_finite != nullptr) *found_non_finite = 1.0f;
}

inline void check(const Piece& p, std::int64_t row) {
  const auto dtype_ok = [](std::int64_t dtype) { return dtype >= 0 && dtype < adam::kDtypeCount; };
  const char* reason = nullptr;
  if (p.numel < 0 || (p.numel > 0 && (p.from_address == 0 || p.to_address == 0))) reason = "no memory";
  if (!dtype_ok(p.from_dtype) || !dtype_ok(p.to_dtype)) {
    reason = "unknown dtype code";
  } else if (p.from_address % adam::dtype_bytes(p.from_dtype) != 0 || p.to_address % adam::dtype_bytes(p.to_dtype) != 0) {
    reason = "an address is not aligned to its element";
  }
  if (reason == nullptr) return;
  throw std::invalid_argument("piece " + std::to_string(row) + " (" + std::to_string(p.numel) + " elements, dtypes " +
                              std::to_string(p.from_dtype) + " to " + std::to_string(p.to_dtype) + "): " + reason);
}

inline void run_copy(const Piece* pieces, std::int64_t piece_count, std::uint64_t found_address, std::uint64_t stream) {
  for (std::int64_t row = 0; row != piece_count; ++row) check(pieces[row], row);
  if (found_address % sizeof(float) != 0) throw std::invalid_argument("the flag's address is not aligned to fp32");
  Batcher<CopyRow> rows([&](const Batch<CopyRow>& batch) {
    launch(copy_pieces, batch.block_count, kThreads, stream, batch, reinterpret_cast<float*>(found_address));
  });
  for (const Piece* p = pieces; p != pieces + piece_count; ++p) {
    rows.add({reinterpret_cast<const void*>(p->from_address), reinterpret_cast<void*>(p->to_address), p->numel, 0,
              static_cast<std::int16_t>(p->from_dtype), static_cast<std::int16_t>(p->to_dtype)},
             elements_past(static_cast<std::uintptr_t>(p->to_address),
                           static_cast<std::size_t>(adam::dtype_bytes(p->to_dtype))));
  }
  rows.finish();
}

}  // namespace
}  // namespace mlp_offload::cuda
