// The work that the fake NCCL runs in a stream.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/half.h"
#include "fake_nccl.h"

namespace farandole::cuda::fake_nccl {
namespace {

template <typename T>
T folded(int op, T a, T b) {
  if (op == kNcclProduct) return static_cast<T>(a * b);
  if (op == kNcclMax) return std::max(a, b);
  if (op == kNcclMin) return std::min(a, b);
  return static_cast<T>(a + b);
}

template <typename T>
void fold_as(int op, std::byte* into, const std::byte* more, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    T a, b;
    std::memcpy(&a, into + i * sizeof a, sizeof a);
    std::memcpy(&b, more + i * sizeof b, sizeof b);
    a = folded(op, a, b);
    std::memcpy(into + i * sizeof a, &a, sizeof a);
  }
}

template <FloatFormat format>
double get(const std::byte* at) {
  BitsOf<format> bits;
  std::memcpy(&bits, at, sizeof bits);
  return std::bit_cast<double>(convert<format, kFloat64>(bits));
}
template <FloatFormat format>
void put(std::byte* at, double value) {
  const auto bits =
      static_cast<BitsOf<format>>(convert<kFloat64, format>(std::bit_cast<uint64_t>(value)));
  std::memcpy(at, &bits, sizeof bits);
}
template <FloatFormat format>
void fold_floats(int op, std::byte* into, const std::byte* more, size_t n) {
  for (size_t i = 0; i < n * sizeof(BitsOf<format>); i += sizeof(BitsOf<format>))
    put<format>(into + i, folded(op, get<format>(into + i), get<format>(more + i)));
}
template <FloatFormat format>
void scale_floats(std::byte* at, size_t n, double by) {
  for (size_t i = 0; i < n * sizeof(BitsOf<format>); i += sizeof(BitsOf<format>))
    put<format>(at + i, get<format>(at + i) * by);
}

void fold(int type, int op, std::byte* into, const std::byte* more, size_t n) {
  switch (type) {
    case kNcclInt8:
      return fold_as<int8_t>(op, into, more, n);
    case kNcclUint8:
      return fold_as<uint8_t>(op, into, more, n);
    case kNcclInt32:
      return fold_as<int32_t>(op, into, more, n);
    case kNcclUint32:
      return fold_as<uint32_t>(op, into, more, n);
    case kNcclInt64:
      return fold_as<int64_t>(op, into, more, n);
    case kNcclUint64:
      return fold_as<uint64_t>(op, into, more, n);
    case kNcclFloat16:
      return fold_floats<kFloat16>(op, into, more, n);
    case kNcclFloat32:
      return fold_floats<kFloat32>(op, into, more, n);
    case kNcclFloat64:
      return fold_floats<kFloat64>(op, into, more, n);
    default:
      return fold_floats<kBFloat16>(op, into, more, n);
  }
}

void scale(int type, std::byte* at, size_t n, double by) {
  if (by == 1) return;
  if (type == kNcclFloat16) scale_floats<kFloat16>(at, n, by);
  if (type == kNcclFloat32) scale_floats<kFloat32>(at, n, by);
  if (type == kNcclFloat64) scale_floats<kFloat64>(at, n, by);
  if (type == kNcclBfloat16) scale_floats<kBFloat16>(at, n, by);
}

/// One collective: all give what they have of it, piece by piece, and take what is theirs.
struct Collective {
  Communicator& all;
  const Task& task;
  size_t width = width_of(task.type);

  std::byte* slot(int r) const { return all.table->seats[r].slot; }
  size_t given() const {  // elements, from each rank that gives
    return task.what == What::reduce_scatter ? task.count * static_cast<size_t>(all.size)
                                             : task.count;
  }
  bool gives() const { return task.what != What::broadcast || task.peer == all.rank; }

  void run() const {
    const size_t most = kSlotBytes / width;
    for (size_t begin = 0; begin < given(); begin += most) {
      const size_t n = std::min(most, given() - begin);
      if (gives()) {
        std::memcpy(slot(all.rank), task.from + begin * width, n * width);
        scale(task.type, slot(all.rank), n, task.factor);
      }
      meet(all);
      take(begin, n);
      meet(all);
    }
  }

  void take(size_t begin, size_t n) const {
    switch (task.what) {
      case What::reduce:
        if (task.peer != all.rank) return;
        [[fallthrough]];
      case What::all_reduce:
        return fold_all(task.to + begin * width, 0, n);
      case What::reduce_scatter: {
        const size_t mine = static_cast<size_t>(all.rank) * task.count;
        const size_t first = std::max(begin, mine), end = std::min(begin + n, mine + task.count);
        if (first < end) fold_all(task.to + (first - mine) * width, first - begin, end - first);
        return;
      }
      case What::all_gather:
        for (int r = 0; r < all.size; ++r)
          std::memcpy(task.to + (static_cast<size_t>(r) * task.count + begin) * width, slot(r),
                      n * width);
        return;
      default:
        std::memcpy(task.to + begin * width, slot(task.peer), n * width);
    }
  }

  /// From the last rank to the first.
  void fold_all(std::byte* to, size_t first, size_t n) const {
    std::vector<std::byte> sum(n * width);
    std::memcpy(sum.data(), slot(all.size - 1) + first * width, n * width);
    for (int r = all.size - 2; r >= 0; --r)
      fold(task.type, task.op, sum.data(), slot(r) + first * width, n);
    std::memcpy(to, sum.data(), n * width);
  }
};

/// Whether all run the same.
bool agree(Communicator& all, const Task& task) {
  uint64_t hash = static_cast<uint64_t>(task.what) + 1;
  for (const uint64_t part :
       {uint64_t{task.count}, static_cast<uint64_t>(task.type), static_cast<uint64_t>(task.op),
        static_cast<uint64_t>(task.peer), std::bit_cast<uint64_t>(task.factor)})
    hash = hash * 0x9e3779b97f4a7c15 + part;
  all.table->seats[all.rank].said.store(hash);
  meet(all);
  bool same = true;
  for (int r = 0; r < all.size; ++r) same &= all.table->seats[r].said.load() == hash;
  meet(all);
  return same;
}

/// One of several messages to and from others, all of which go on at once.
struct Message {
  const Task& task;
  size_t done = 0, bytes = task.count * width_of(task.type);
};

void move(Communicator& all, Message& m) {
  const bool sends = m.task.what == What::send;
  const int from = sends ? all.rank : m.task.peer, to = sends ? m.task.peer : all.rank;
  Mail& mail = all.table->seats[from].to[to];
  const uint64_t written = mail.written.load(std::memory_order_acquire);
  const uint64_t read = mail.read.load(std::memory_order_acquire);
  if (sends && written == read) {
    const size_t n = std::min(kMailBytes, m.bytes - m.done);
    std::memcpy(mail.data, m.task.from + m.done, n);
    m.done += n;
    mail.written.store(written + n, std::memory_order_release);
  } else if (!sends && written != read) {
    const size_t n = std::min<size_t>(written - read, m.bytes - m.done);
    std::memcpy(m.task.to + m.done, mail.data, n);
    m.done += n;
    mail.read.store(written, std::memory_order_release);
  }
}

void exchange(Communicator& all, const std::vector<Task>& tasks) {
  std::vector<Message> messages;
  for (const Task& task : tasks) messages.push_back({task});
  for (;;) {
    bool done = true;
    for (Message& m : messages)
      if (m.done < m.bytes) {
        move(all, m);
        done = false;
      }
    if (done) return;
    nap(all);
  }
}

}  // namespace

size_t width_of(int type) {
  if (type == kNcclInt8 || type == kNcclUint8) return 1;
  if (type == kNcclFloat16 || type == kNcclBfloat16) return 2;
  return type == kNcclInt32 || type == kNcclUint32 || type == kNcclFloat32 ? 4 : 8;
}

void run(Communicator& all, const std::vector<Task>& tasks) {
  const auto is_message = [](const Task& t) {
    return t.what == What::send || t.what == What::receive;
  };
  if (std::all_of(tasks.begin(), tasks.end(), is_message)) return exchange(all, tasks);
  for (const Task& task : tasks) {
    if (is_message(task)) return blame("messages and collectives in one group");
    if (!agree(all, task)) {
      blame("ranks run different operations");
      all.state = 5;
      for (;;) nap(all);
    }
    Collective{all, task}.run();
  }
}

}  // namespace farandole::cuda::fake_nccl
