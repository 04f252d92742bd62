// Ranks that agree on an order of operations by name, with messages that are damaged on their way.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>

#include "base/wire.h"
#include "damage.h"
#include "named/negotiator.h"

namespace farandole::fuzz {
namespace {

constexpr int kRanks = 3, kNames = 4;

class Ranks {
 public:
  explicit Ranks(FuzzedDataProvider& input) : input_(input), coordinator_(kRanks, 3) {
    coordinator_.add_set(0, sets_[0]);
    coordinator_.add_set(1, sets_[1]);
    for (int r = 0; r < kRanks; ++r)
      for (int i = 0; i < kNames; ++i)
        names_[static_cast<size_t>(r)].push_back(std::make_unique<Name>());
  }

  void run() {
    for (int turns = 0; turns < 400 && input_.remaining_bytes() > 0; ++turns) turn();
  }

 private:
  void turn() {
    const int r = input_.ConsumeIntegralInRange(0, kRanks - 1);
    const auto index = static_cast<size_t>(r);
    Bytes message;
    switch (input_.ConsumeIntegralInRange(0, 6)) {
      case 0:
        return submit(index);
      case 1:
        if (joined_[index]) return;
        joined_[index] = true;
        return participants_[index].join(TimePoint{});
      case 2:
        if (participants_[index].take_message(message))
          coordinator_.receive(r, damaged(std::move(message), input_), TimePoint{});
        return;
      case 3:
        return coordinator_.order();
      case 4:
        for (const auto& one : coordinator_.waiting())
          if (input_.ConsumeBool()) return coordinator_.tell_late(one);
        return;
      case 5:
        return coordinator_.refuse_crossed(TimePoint::max());
      default:
        if (coordinator_.take_message(r, message)) hear(index, damaged(std::move(message), input_));
    }
  }

  void submit(size_t rank) {
    const size_t i = input_.ConsumeIntegralInRange<size_t>(0, kNames - 1);
    Name& name = *names_[rank][i];
    if (name.state != Name::State::resting || joined_[rank]) return;
    const uint32_t set = rank == 0 ? 0 : input_.ConsumeIntegralInRange<uint32_t>(0, 1);
    Signature wanted = signature(set, i);
    if (!(wanted == name.signature)) {
      name.signature = std::move(wanted);
      name.agreed = false;
    }
    participants_[rank].submit(name);
    in_flight_[rank].insert(&name);
  }

  /// By its number, or by that of its set, which differs between ranks now and then.
  Signature signature(uint32_t set, size_t i) {
    constexpr Collective kKinds[] = {Collective::all_reduce, Collective::all_gather,
                                     Collective::all_to_all, Collective::barrier};
    Signature t;
    t.kind = kKinds[i];
    t.name = "x" + std::to_string(i);
    t.set = set;
    t.lasting = input_.ConsumeBool();
    const int64_t rows = input_.ConsumeIntegralInRange(0, 3);
    if (t.kind != Collective::barrier) t.tensors = {{DType::float32, {rows, 2}}};
    if (t.kind == Collective::all_to_all) {
      t.splits.assign(sets_[set].size(), 0);
      t.splits[0] = rows;
    }
    if (t.kind == Collective::all_reduce && input_.ConsumeBool()) t.note = "a\nb";
    return t;
  }

  /// As Named::apply takes it. What is not in flight must not be decided.
  void hear(size_t rank, const Bytes& message) {
    std::vector<Decision> decisions;
    participants_[rank].receive(message, decisions);
    for (const Decision& d : decisions) {
      const bool runs = d.what == Decision::What::run;
      if (runs || d.what == Decision::What::refuse)
        if (in_flight_[rank].erase(d.name) == 0) __builtin_trap();
      if (d.what == Decision::What::joined) joined_[rank] = false;
      if (d.what == Decision::What::by_proxy) check(rank, d.more->signature, d.more->extents, {});
      if (!runs) continue;
      const Signature& mine = d.name->signature;
      check(rank, mine, d.more && d.more->once ? d.more->extents : d.name->extents,
            extents_of(mine));
    }
  }

  void check(size_t rank, const Signature& signature, std::span<const int64_t> extents,
             std::span<const int64_t> own) const {
    if (signature.set >= 2) WireReader::malformed("a set");
    const std::vector<int>& members = sets_[signature.set];
    const auto me = std::ranges::find(members, static_cast<int>(rank));
    if (me == members.end()) WireReader::malformed("a set without this rank");
    check_signature(signature, members);
    check_extents(signature, members.size(), extents, static_cast<int>(me - members.begin()), own);
  }

  FuzzedDataProvider& input_;
  const std::vector<int> sets_[2] = {{0, 1, 2}, {1, 2}};
  Coordinator coordinator_;
  Participant participants_[kRanks];
  std::vector<std::unique_ptr<Name>> names_[kRanks];
  std::set<const Name*> in_flight_[kRanks];
  bool joined_[kRanks] = {};
};

}  // namespace
}  // namespace farandole::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace farandole::fuzz;
  FuzzedDataProvider input(data, size);
  refused([&] { Ranks(input).run(); });
  return 0;
}
