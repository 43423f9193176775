// The io_uring engine: one thread submits and reaps; up to iodepth blocks are in flight in the kernel.
#include "io/engine.h"

#ifdef MLP_OFFLOAD_HAVE_LIBURING

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

namespace mlp_offload::io {
namespace {

constexpr uint64_t kWake = ~uint64_t{0};               // user data of the poll on the event descriptor
constexpr uint64_t kBufferBytes = uint64_t{1} << 30;   // the kernel registers at most 1 GiB a piece
constexpr double kRegisterSeconds = 30.0;              // for the ring thread to get to it
constexpr unsigned kSubmitRetryLimit = 10000;          // EAGAIN or EBUSY in a row, 1 ms apart
constexpr auto kPollInterval = std::chrono::milliseconds(1);

class Ring {
 public:
  explicit Ring(unsigned entries) {
    const int error = io_uring_queue_init(entries, &ring_, 0);
    if (error < 0) throw std::system_error(-error, std::generic_category(), "io_uring_setup");
  }
  ~Ring() { close(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  io_uring* get() { return &ring_; }
  void close() {
    if (std::exchange(open_, false)) io_uring_queue_exit(&ring_);
  }

 private:
  io_uring ring_;
  bool open_ = true;
};

class UringCore final : public Core {
 public:
  explicit UringCore(const Settings& settings)
      : Core(settings, open_file(settings)), ring_(settings.iodepth + 1), slots_(settings.iodepth) {
    const int error = io_uring_ring_dontfork(ring_.get());
    if (error < 0) throw std::system_error(-error, std::generic_category(), "madvise of the ring");
    event_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (event_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (unsigned i = settings.iodepth; i > 0; --i) free_.push_back(i - 1);
  }

  void run() override;
  bool register_buffers(char* address, uint64_t nbytes) override;
  void release() override {
    ring_.close();  // and unpins the registered buffers
    event_.close();
    Core::release();
  }

 protected:
  void wake() override {
    const uint64_t one = 1;
    // EAGAIN: the counter is full, so the thread is about to wake anyway.
    while (write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  enum class Registration { none, asked, working, accepted, refused };

  unsigned busy() const { return static_cast<unsigned>(slots_.size() - free_.size()); }
  void move_blocks();
  void fill();
  void prepare(unsigned slot);
  int fixed_buffer(const Block& block) const;
  void arm_wake();
  void submit(bool wait);
  void reap();
  void handle(unsigned slot, int result);
  void serve_registration();
  bool registration_pending();
  void break_ring(int error);

  Ring ring_;
  Fd event_;
  bool wake_armed_ = false;
  int broken_ = 0;
  unsigned submit_retries_ = 0;
  std::vector<Block> slots_;
  std::vector<unsigned> free_;
  std::deque<uint64_t> unsubmitted_;  // user data of prepared entries that the kernel has not taken, oldest first

  std::mutex registration_mutex_;
  std::condition_variable registration_done_;
  Registration registration_ = Registration::none;
  bool ended_ = false;                  // the ring thread
  char* registered_address_ = nullptr;  // the ring thread alone reads these while it runs
  uint64_t registered_nbytes_ = 0;
  char* asked_address_ = nullptr;
  uint64_t asked_nbytes_ = 0;
};

void UringCore::run() {
  move_blocks();
  {
    std::lock_guard<std::mutex> lock(registration_mutex_);
    ended_ = true;
  }
  registration_done_.notify_all();
}

void UringCore::move_blocks() {
  while (broken_ == 0) {
    serve_registration();
    fill();
    if (busy() == 0 && stopping()) return;
    arm_wake();
    submit(true);
    reap();
  }
  // The kernel takes no more entries, but what it has in flight still completes.
  while (busy() != 0) {
    reap();
    std::this_thread::sleep_for(kPollInterval);
  }
}

void UringCore::fill() {
  if (registration_pending()) return;
  while (broken_ == 0 && !free_.empty() && try_block(slots_[free_.back()])) {
    const unsigned slot = free_.back();
    free_.pop_back();
    before_transfer(slots_[slot]);
    prepare(slot);
  }
}

// Index of the registered piece that holds all of the block's memory, -1 when there is none.
int UringCore::fixed_buffer(const Block& block) const {
  if (registered_nbytes_ == 0 || block.left_address() < registered_address_) return -1;
  const auto begin = static_cast<uint64_t>(block.left_address() - registered_address_);
  const uint64_t end = begin + block.left_nbytes();
  if (end > registered_nbytes_ || begin / kBufferBytes != (end - 1) / kBufferBytes) return -1;
  return static_cast<int>(begin / kBufferBytes);
}

void UringCore::prepare(unsigned slot) {
  Block& block = slots_[slot];
  // There is an entry for every slot and the wake-up, so one is always free.
  io_uring_sqe* entry = broken_ == 0 ? io_uring_get_sqe(ring_.get()) : nullptr;
  if (entry == nullptr) {
    block.error = broken_ != 0 ? broken_ : EBUSY;
    finish(block);
    free_.push_back(slot);
    return;
  }
  const int number = file();
  const auto nbytes = static_cast<unsigned>(block.left_nbytes());
  const int buffer = fixed_buffer(block);
  if (block.request->operation == Operation::read) {
    if (buffer >= 0)
      io_uring_prep_read_fixed(entry, number, block.left_address(), nbytes, block.left_offset(), buffer);
    else
      io_uring_prep_read(entry, number, block.left_address(), nbytes, block.left_offset());
  } else {
    if (buffer >= 0)
      io_uring_prep_write_fixed(entry, number, block.left_address(), nbytes, block.left_offset(), buffer);
    else
      io_uring_prep_write(entry, number, block.left_address(), nbytes, block.left_offset());
  }
  entry->user_data = slot;
  unsubmitted_.push_back(slot);
}

void UringCore::arm_wake() {
  // Kernels before 5.13 register buffers only once nothing is in flight, not even this poll.
  if (wake_armed_ || (registration_pending() && busy() != 0)) return;
  io_uring_sqe* entry = io_uring_get_sqe(ring_.get());
  if (entry == nullptr) return;
  io_uring_prep_poll_add(entry, event_.get(), POLLIN);
  entry->user_data = kWake;
  unsubmitted_.push_back(kWake);
  wake_armed_ = true;
}

void UringCore::submit(bool wait) {
  const int result = wait ? io_uring_submit_and_wait(ring_.get(), 1) : io_uring_submit(ring_.get());
  while (unsubmitted_.size() > io_uring_sq_ready(ring_.get())) unsubmitted_.pop_front();
  if (result >= 0 || result == -EINTR) {
    submit_retries_ = 0;
  } else if ((result == -EAGAIN || result == -EBUSY) && ++submit_retries_ < kSubmitRetryLimit) {
    std::this_thread::sleep_for(kPollInterval);
  } else {
    break_ring(-result);
  }
}

// io_uring_enter itself is refused (as by a seccomp filter set after the ring was made): nothing can be submitted any
// more. What the kernel has not taken fails here; move_blocks() waits for the rest.
void UringCore::break_ring(int error) {
  broken_ = error;
  break_down(error);
  for (const uint64_t data : unsubmitted_) {
    if (data == kWake) continue;
    const auto slot = static_cast<unsigned>(data);
    slots_[slot].error = error;
    finish(slots_[slot]);
    free_.push_back(slot);
  }
  unsubmitted_.clear();
}

void UringCore::reap() {
  io_uring_cqe* entry = nullptr;
  while (io_uring_peek_cqe(ring_.get(), &entry) == 0) {
    const uint64_t data = entry->user_data;
    const int result = entry->res;
    io_uring_cqe_seen(ring_.get(), entry);
    if (data != kWake) {
      handle(static_cast<unsigned>(data), result);
      continue;
    }
    wake_armed_ = false;
    uint64_t count;
    // Non-blocking: EAGAIN means that somebody's poll already saw it.
    while (read(event_.get(), &count, sizeof count) < 0 && errno == EINTR) {
    }
  }
}

void UringCore::handle(unsigned slot, int result) {
  if (after_call(slots_[slot], result) == Next::again) return prepare(slot);
  // The next blocks go to the kernel first, so that the device works while this one's checksum is computed.
  Block finished = std::move(slots_[slot]);
  free_.push_back(slot);
  fill();
  if (!unsubmitted_.empty()) submit(false);
  finish(finished);
}

bool UringCore::register_buffers(char* address, uint64_t nbytes) {
  std::unique_lock<std::mutex> lock(registration_mutex_);
  if (ended_ || registration_ != Registration::none) return false;
  asked_address_ = address;
  asked_nbytes_ = nbytes;
  registration_ = Registration::asked;
  wake();
  registration_done_.wait_until(lock, deadline_after(kRegisterSeconds),
                                [this] { return ended_ || registration_ > Registration::working; });
  registration_done_.wait(lock, [this] { return registration_ != Registration::working; });
  const bool accepted = registration_ == Registration::accepted;
  registration_ = Registration::none;
  return accepted;
}

bool UringCore::registration_pending() {
  std::lock_guard<std::mutex> lock(registration_mutex_);
  return registration_ == Registration::asked;
}

// Runs on the ring thread, between blocks: see arm_wake.
void UringCore::serve_registration() {
  if (busy() != 0 || wake_armed_) return;
  {
    std::lock_guard<std::mutex> lock(registration_mutex_);
    if (registration_ != Registration::asked) return;
    registration_ = Registration::working;
  }
  if (registered_nbytes_ != 0) io_uring_unregister_buffers(ring_.get());
  registered_nbytes_ = 0;
  std::vector<iovec> pieces;
  for (uint64_t at = 0; at < asked_nbytes_; at += kBufferBytes)
    pieces.push_back({asked_address_ + at, std::min(kBufferBytes, asked_nbytes_ - at)});
  const bool accepted =
      io_uring_register_buffers(ring_.get(), pieces.data(), static_cast<unsigned>(pieces.size())) == 0;
  if (accepted) {
    registered_address_ = asked_address_;
    registered_nbytes_ = asked_nbytes_;
  }
  {
    std::lock_guard<std::mutex> lock(registration_mutex_);
    registration_ = accepted ? Registration::accepted : Registration::refused;
  }
  registration_done_.notify_all();
}

}  // namespace

std::shared_ptr<Core> make_uring(const Settings& settings) { return std::make_shared<UringCore>(settings); }

bool uring_compiled() { return true; }

std::pair<bool, std::string> uring_available() {
  try {
    Ring ring(2);
    io_uring_probe* probe = io_uring_get_probe_ring(ring.get());
    const bool enough = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                        io_uring_opcode_supported(probe, IORING_OP_WRITE);
    if (probe != nullptr) io_uring_free_probe(probe);
    if (!enough) return {false, "this kernel's io_uring has no plain read and write (Linux 5.6 has)"};
    return {true, ""};
  } catch (const std::system_error& error) {
    std::string reason = std::string("io_uring_setup: ") + std::strerror(error.code().value());
    if (error.code().value() == EPERM) reason += " (see /proc/sys/kernel/io_uring_disabled, or a seccomp filter)";
    return {false, reason};
  }
}

}  // namespace mlp_offload::io

#else

#include <cerrno>
#include <system_error>

namespace mlp_offload::io {

std::shared_ptr<Core> make_uring(const Settings&) {
  throw std::system_error(ENOSYS, std::generic_category(), "built without liburing");
}

bool uring_compiled() { return false; }

std::pair<bool, std::string> uring_available() { return {false, "built without liburing"}; }

}  // namespace mlp_offload::io

#endif
