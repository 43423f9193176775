// The L2 norm of many tensors, in the order in which Transformer Engine's and Apex's multi-tensor kernels add up their
// fp32 copies; without the copies, and with IEEE rounding, where those are built with fast math.
#pragma once

#include <algorithm>

#include "cuda/element.h"

namespace mlp_offload::cuda {

// A row of the tensors array.
struct NormTensor {
  std::int64_t address, numel, dtype;
};
constexpr int kNormColumnCount = 3;
static_assert(sizeof(NormTensor) == kNormColumnCount * sizeof(std::int64_t), "a row is read as one NormTensor");

// [Note: order of the norm] The order decides the bits. Each tensor is cut into chunks of 65536 elements, its last
// shorter. Chunks, tensor after tensor, are dealt to blocks of 512 threads, in rounds: a round ends after 320 chunks, or
// with the last chunk of the 110th tensor that it touches. In a chunk, each thread adds squares (by fma) to four sums:
// four neighbours, then those 2048 further on, where what is left of the tensor is a multiple of four and aligned;
// otherwise elements 512 apart. It adds its four sums from the first on, and the block those of its threads in a tree of
// halves. A block's results of all rounds are added one after another; the 320 blocks' results in a tree of 512.
// An fp32 copy of a 16-bit tensor is aligned always, so a 16-bit tensor counts as aligned.
constexpr std::int64_t kChunkNumel = 65536;
constexpr unsigned kNormThreads = 512, kNormBlocks = 320;
constexpr int kRoundTensors = 110;

namespace {

struct NormRow {
  const void* address;
  std::int64_t numel, first_chunk;
  unsigned first_block;
  std::int16_t dtype;
  bool aligned;
};

using NormRound = Batch<NormRow, kRoundTensors>;

// Sum over the block, in thread 0.
__device__ inline float block_sum(float mine) {
  __shared__ float sums[kNormThreads];
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = kNormThreads / 2; half != 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] = __fadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
    __syncthreads();
  }
  return sums[0];
}

__device__ inline void add_square(float& sum, float x, float inverse_scale) {
  const float unscaled = __fmul_rn(x, inverse_scale);
  sum = __fmaf_rn(unscaled, unscaled, sum);
}

__device__ inline float load_one(const NormRow& row, std::int64_t i) {
  if (row.dtype == kBf16) return Rounded::load(static_cast<const Bf16*>(row.address) + i);
  if (row.dtype == kFp16) return Rounded::load(static_cast<const Fp16*>(row.address) + i);
  return static_cast<const float*>(row.address)[i];
}

// One round. `inverse_scale` may be null: 1, which changes no bits.
__global__ void __launch_bounds__(kNormThreads)
    add_squares(const NormRound __grid_constant__ batch, const float* inverse_scale, float* block_sums) {
  const NormRow& row = row_of_block(batch);
  const std::int64_t begin = (row.first_chunk + (blockIdx.x - row.first_block)) * kChunkNumel;
  const std::int64_t left = row.numel - begin, count = left < kChunkNumel ? left : kChunkNumel;
  const float scale = inverse_scale == nullptr ? 1.0f : *inverse_scale;
  float sums[4] = {};
  if (left % 4 == 0 && row.aligned) {
    for (std::int64_t i = 4 * threadIdx.x; i < count; i += 4 * kNormThreads) {
      float x[4];
      load_as(row.dtype, x, row.address, begin + i, 4);
      for (int k = 0; k != 4; ++k) add_square(sums[k], x[k], scale);
    }
  } else {
    for (std::int64_t start = threadIdx.x; start < count; start += 4 * kNormThreads) {
      for (int k = 0; k != 4; ++k) {
        const std::int64_t i = start + k * kNormThreads;
        if (i < count) add_square(sums[k], load_one(row, begin + i), scale);
      }
    }
  }
  float mine = 0.0f;
  for (int k = 0; k != 4; ++k) mine = __fadd_rn(mine, sums[k]);
  const float total = block_sum(mine);
  if (threadIdx.x == 0) block_sums[blockIdx.x] = __fadd_rn(block_sums[blockIdx.x], total);
}

__global__ void __launch_bounds__(kNormThreads) norm_of_sums(const float* block_sums, float* norm) {
  const float total = block_sum(threadIdx.x < kNormBlocks ? block_sums[threadIdx.x] : 0.0f);
  if (threadIdx.x == 0) *norm = __fsqrt_rn(total);
}

inline void check(const NormTensor& t, std::int64_t row) {
  const char* reason = nullptr;
  if (t.numel < 1 || t.address == 0) reason = "no elements";
  if (t.dtype < 0 || t.dtype >= adam::kDtypeCount) {
    reason = "unknown dtype code";
  } else if (t.address % adam::dtype_bytes(t.dtype) != 0) {
    reason = "the address is not aligned to its element";
  }
  if (reason == nullptr) return;
  throw std::invalid_argument("norm tensor " + std::to_string(row) + " (" + std::to_string(t.numel) +
                              " elements, dtype " + std::to_string(t.dtype) + "): " + reason);
}

inline void run_norm(const NormTensor* tensors, std::int64_t tensor_count, std::uint64_t inverse_scale_address,
                     std::uint64_t sums_address, std::uint64_t norm_address, std::uint64_t stream) {
  for (std::int64_t row = 0; row != tensor_count; ++row) check(tensors[row], row);
  for (const std::uint64_t address : {inverse_scale_address, sums_address, norm_address}) {
    if (address % sizeof(float) != 0) throw std::invalid_argument("an fp32 address of the norm is not aligned");
  }
  if (sums_address == 0 || norm_address == 0) throw std::invalid_argument("the norm has no memory for its result");
  float* const sums = reinterpret_cast<float*>(sums_address);
  clear(sums_address, kNormBlocks * sizeof(float), stream);

  NormRound round;
  for (const NormTensor* t = tensors; t != tensors + tensor_count; ++t) {
    const std::int64_t chunk_count = (t->numel + kChunkNumel - 1) / kChunkNumel;
    for (std::int64_t chunk = 0; chunk != chunk_count;) {
      const std::int64_t taken = std::min<std::int64_t>(chunk_count - chunk, kNormBlocks - round.block_count);
      round.rows[round.count++] = {reinterpret_cast<const void*>(t->address), t->numel, chunk, round.block_count,
                                   static_cast<std::int16_t>(t->dtype),
                                   t->dtype != kFp32 || t->address % sizeof(Four<float>) == 0};
      round.block_count += static_cast<unsigned>(taken);
      chunk += taken;
      const bool whole = chunk == chunk_count;
      if (round.block_count == kNormBlocks || (whole && (round.count == kRoundTensors || t + 1 == tensors + tensor_count))) {
        launch_in_step(add_squares, round.block_count, kNormThreads, stream, round,
                       reinterpret_cast<const float*>(inverse_scale_address), sums);
        round.count = 0;
        round.block_count = 0;
      }
    }
  }
  launch_in_step(norm_of_sums, 1u, kNormThreads, stream, static_cast<const float*>(sums),
                 reinterpret_cast<float*>(norm_address));
}

}  // namespace
}  // namespace mlp_offload::cuda
