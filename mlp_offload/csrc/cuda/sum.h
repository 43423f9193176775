// Sums of weights on the device: those of adam::SumFunction, by which a weight that somebody else changed is noticed.
#pragma once

#include "cuda/element.h"

namespace mlp_offload::cuda {

// A row of the runs array: `numel` 16-bit words.
struct WordRun {
  std::int64_t address, numel;
};
constexpr int kWordRunColumnCount = 2;
static_assert(sizeof(WordRun) == kWordRunColumnCount * sizeof(std::int64_t), "a row is read as one WordRun");

constexpr std::int64_t kSumQuadsPerThread = 64;

namespace {

struct SumRow {
  const Bf16* words;
  std::uint32_t* sum;
  std::int64_t numel;
  unsigned first_block;
};

// Integers add up to the same sum in any order.
__global__ void __launch_bounds__(kThreads) sum_words(const Batch<SumRow> __grid_constant__ batch) {
  const SumRow& row = row_of_block(batch);
  const unsigned past = elements_past(reinterpret_cast<std::uintptr_t>(row.words), sizeof(Bf16));
  const std::int64_t begin =
      static_cast<std::int64_t>(blockIdx.x - row.first_block) * kThreads * kSumQuadsPerThread + threadIdx.x;
  std::uint32_t mine = 0;
  for (std::int64_t i = 0; i != kSumQuadsPerThread; ++i) {
    const Quad quad(begin + i * kThreads, past, row.numel);
    if (quad.count <= 0) break;
    Bf16 words[4] = {};
    load(words, row.words + quad.first, quad.count);
    const std::uint32_t factor = 2 * static_cast<std::uint32_t>(quad.first) + 1;
    for (std::uint32_t k = 0; k != 4; ++k) mine += words[k].bits * (factor + 2 * k);
  }
  add_by_warp(row.sum, mine);
}

inline void run_sum(const WordRun* runs, std::int64_t run_count, std::uint64_t sums_address, std::uint64_t stream) {
  for (std::int64_t i = 0; i != run_count; ++i) {
    const char* reason = nullptr;
    if (runs[i].numel < 0 || (runs[i].numel > 0 && runs[i].address == 0)) reason = "no memory";
    if (runs[i].address % sizeof(Bf16) != 0) reason = "the address is not aligned to 16 bits";
    if (reason == nullptr) continue;
    throw std::invalid_argument("run " + std::to_string(i) + " (" + std::to_string(runs[i].numel) +
                                " words): " + reason);
  }
  if (run_count == 0) return;
  if (sums_address == 0 || sums_address % sizeof(std::uint32_t) != 0) {
    throw std::invalid_argument("the sums have no memory, or none that is aligned to 32 bits");
  }
  clear(sums_address, static_cast<std::size_t>(run_count) * sizeof(std::uint32_t), stream);
  Batcher<SumRow, kThreads * kSumQuadsPerThread> rows(
      [&](const Batch<SumRow>& batch) { launch(sum_words, batch.block_count, kThreads, stream, batch); });
  for (std::int64_t i = 0; i != run_count; ++i) {
    rows.add({reinterpret_cast<const Bf16*>(runs[i].address), reinterpret_cast<std::uint32_t*>(sums_address) + i,
              runs[i].numel, 0},
             elements_past(static_cast<std::uintptr_t>(runs[i].address), sizeof(Bf16)));
  }
  rows.finish();
}

}  // namespace
}  // namespace mlp_offload::cuda
