// Rows of work as kernel arguments, and elements four at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "adam/update.h"
#include "cuda/runtime.h"

namespace mlp_offload::cuda {

// [Note: rows as arguments] A launch gets its table of work as a kernel argument (up to 32764 bytes): copied at the
// launch, so that nobody has to keep a table alive, pinned or on the device. Work of more rows takes several launches.
template <class Row>
constexpr int kMostRows = static_cast<int>((32764 - 2 * sizeof(std::int64_t)) / sizeof(Row));

template <class Row, int kCapacity = kMostRows<Row>>
struct Batch {
  int count = 0;
  unsigned block_count = 0;
  Row rows[kCapacity];
};

// The row that the calling block works on. Each row has blocks of its own, from first_block on.
template <class Row, int kCapacity>
__device__ const Row& row_of_block(const Batch<Row, kCapacity>& batch) {
  int low = 0, high = batch.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.rows[middle].first_block <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return batch.rows[low];
}

constexpr unsigned kThreads = 256;
constexpr unsigned kQuadsPerThread = 4;
constexpr std::int64_t kTileQuads = kThreads * kQuadsPerThread;  // of one block

// Collects rows; `launch_batch(batch)` is called for every batch that is full, and by finish() for the rest. A block works
// on kBlockQuads quads of a row.
template <class Row, std::int64_t kBlockQuads = kTileQuads>
class Batcher {
 public:
  explicit Batcher(std::function<void(const Batch<Row>&)> launch_batch) : launch_batch_(std::move(launch_batch)) {}

  // `past`: as for Quad.
  void add(Row row, unsigned past) {
    if (row.numel == 0) return;
    const std::int64_t quads = (row.numel + past + 3) / 4;
    const auto blocks = static_cast<unsigned>((quads + kBlockQuads - 1) / kBlockQuads);
    if (batch_.count == kMostRows<Row> || batch_.block_count + blocks > 0x7fffffffu) finish();
    row.first_block = batch_.block_count;
    batch_.rows[batch_.count++] = row;
    batch_.block_count += blocks;
  }

  void finish() {
    if (batch_.count != 0) launch_batch_(batch_);
    batch_.count = 0;
    batch_.block_count = 0;
  }

 private:
  std::function<void(const Batch<Row>&)> launch_batch_;
  Batch<Row> batch_;
};

// Up to four neighbours of a row: quad `index` of a row whose first element lies `past` elements behind an address that
// four elements at once may be loaded from. So all but the first and the last quad of a row are whole and aligned.
struct Quad {
  std::int64_t first;
  int count;  // <= 0: beyond the row

  __device__ Quad(std::int64_t index, unsigned past, std::int64_t numel) {
    const std::int64_t begin = 4 * index - past, end = begin + 4 < numel ? begin + 4 : numel;
    first = begin > 0 ? begin : 0;
    count = static_cast<int>(end - first);
  }
};

__host__ __device__ inline unsigned elements_past(std::uintptr_t address, std::size_t itemsize) {
  return static_cast<unsigned>(address / itemsize % 4);
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x[4];
};

// One vector instruction where address and count allow it.
template <class T>
__device__ inline void load(T (&to)[4], const T* from, int count) {
  if (count == 4 && reinterpret_cast<std::uintptr_t>(from) % sizeof(Four<T>) == 0) {
    const Four<T> four = *reinterpret_cast<const Four<T>*>(from);
    for (int i = 0; i != 4; ++i) to[i] = four.x[i];
  } else {
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

template <class T>
__device__ inline void store(T* to, const T (&from)[4], int count) {
  if (count == 4 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Four<T>) == 0) {
    Four<T> four;
    for (int i = 0; i != 4; ++i) four.x[i] = from[i];
    *reinterpret_cast<Four<T>*>(to) = four;
  } else {
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

}  // namespace mlp_offload::cuda
