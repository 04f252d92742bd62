// Messages of other ranks and contents of files are checked where they are decoded. The fuzzers in
// tests/fuzz look for cases that are missing here.
#include <functional>
#include <limits>

#include "check.h"
#include "control/control_messages.h"
#include "named/negotiation_messages.h"
#include "named/negotiator.h"
#include "stream/agreement_messages.h"
#include "transport/segment.h"

namespace farandole {
namespace {

template <typename Message>
std::vector<std::byte> encoded(const Message& message) {
  WireWriter to;
  put_message(to, message);
  return to.take();
}

bool is_malformed(const std::function<void()>& take) {
  try {
    take();
    return false;
  } catch (const Malformed&) {
    return true;
  }
}

template <typename Message>
void check_every_length(const Message& message) {
  std::vector<std::byte> bytes = encoded(message);
  CHECK(!is_malformed([&] { get_whole<Message>(bytes); }));
  for (size_t length = 0; length < bytes.size(); ++length)
    CHECK(is_malformed([&] { get_whole<Message>(std::span(bytes).first(length)); }));
  bytes.push_back({});
  CHECK(is_malformed([&] { get_whole<Message>(bytes); }));
}

Signature signature_by_name(Collective kind, std::vector<int64_t> shape) {
  Signature t;
  t.kind = kind;
  t.name = "x";
  t.tensors = {{DType::float32, std::move(shape)}};
  return t;
}

}  // namespace

TEST(a_message_is_as_long_as_its_fields) {
  check_every_length(DeathMessage{});
  check_every_length(AnswerMessage{7, StreamProgress{1, 2, {3}}});
  check_every_length(OrderedAgreed{{true, 1}, 2, {{3, 4}}});
  check_every_length(Shown{describe(Operation{}), {BundledArray{}}});
}

TEST(a_length_alone_takes_no_memory) {
  WireWriter to;
  to.put(static_cast<uint32_t>(kMostExtents));
  const std::vector<std::byte> bytes = to.take();
  CHECK(is_malformed([&] {
    WireReader from(bytes);
    from.get_list<int64_t>(kMostExtents);
  }));
}

TEST(who_takes_a_message_names_it_and_both_ranks) {
  try {
    taken("a greeting", 3, 1, [] { WireReader::malformed("it is rude"); });
  } catch (const Error& error) {
    CHECK_EQUAL(error.verdict(), "a greeting from rank 3 is malformed: it is rude");
    CHECK_EQUAL(error.where().rank, 3);
    CHECK(error.where().evidence.starts_with("seen by rank 1,"));
    return;
  }
  CHECK(false);
}

TEST(signatures_of_other_ranks_are_checked_as_ones_own) {
  const std::vector<int> members{0, 2};
  const auto wrong = [&](const std::function<void(Signature&)>& change,
                         Signature t = signature_by_name(Collective::all_reduce, {2, 3})) {
    CHECK(!is_malformed([&] { check_signature(t, members); }));
    change(t);
    CHECK(is_malformed([&] { check_signature(t, members); }));
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  wrong([](Signature& t) { t.tensors.clear(); });
  wrong([](Signature& t) { t.kind = Collective::recv; });
  wrong([](Signature& t) { t.kind = Collective::barrier; });
  wrong([](Signature& t) { t.tensors[0].shape = {-1}; });
  wrong([](Signature& t) { t.tensors[0].shape = {kMost, kMost}; });
  wrong([](Signature& t) { t.splits = {1}; });
  wrong([](Signature& t) { t.root = 1; }, signature_by_name(Collective::broadcast, {4}));
  wrong([](Signature& t) { t.tensors[0].shape.clear(); },
        signature_by_name(Collective::all_gather, {4}));
  Signature exchange = signature_by_name(Collective::all_to_all, {4});
  exchange.splits = {1, 3};
  wrong([](Signature& t) { t.splits = {4}; }, exchange);
  wrong([](Signature& t) { t.splits = {5, -1}; }, exchange);
  wrong([](Signature& t) { t.splits = {1, 2}; }, exchange);
  wrong([](Signature& t) { t.splits = {kMost, kMost}; }, exchange);
}

TEST(extents_of_other_ranks_are_checked) {
  const Signature gather = signature_by_name(Collective::all_gather, {4, 3});
  const auto refused = [&](const std::vector<int64_t>& extents) {
    return is_malformed([&] { check_extents(gather, 2, extents, 0, extents_of(gather)); });
  };
  CHECK(!refused({4, 0}));
  CHECK(refused({3, 1}));
  CHECK(is_malformed([&] { check_extents(gather, 2, std::vector<int64_t>{4, 1}, 1, {}); }));
  CHECK(refused({4}));
  CHECK(refused({4, 5, 6}));
  CHECK(refused({4, -1}));
  CHECK(refused({int64_t{1} << 61, 1}));
  CHECK(refused({std::numeric_limits<int64_t>::max(), 1}));
}

TEST(an_offer_is_decided_once_and_an_id_means_one_name) {
  Name names[2];
  names[0].signature = signature_by_name(Collective::all_reduce, {4});
  names[1].signature = signature_by_name(Collective::barrier, {});
  Participant rank;
  uint32_t number = 0;
  std::vector<std::byte> offered;
  const auto submit = [&](Name& name) {
    rank.submit(name);
    rank.take_message(offered);
  };
  const auto refused = [&](const auto& put) {
    WireWriter to;
    put_message(to, OrderedHead{1, true});
    put(to);
    std::vector<Decision> decisions;
    return is_malformed([&] { rank.receive(to.take(), decisions); });
  };
  const auto agreed = [&](WireWriter& to) {
    put_tagged<OrderedAgreed>(to, Reference{false, number}, 5u, std::vector<int64_t>{});
  };
  const auto runs = [](WireWriter& to) {
    put_tagged<OrderedRuns>(to, std::vector<uint32_t>{5, 1});
  };
  submit(names[0]);
  CHECK(!refused(agreed));
  CHECK(refused(agreed));
  CHECK(refused(runs));  // as long as it is at rest
  submit(names[0]);
  CHECK(refused([&](WireWriter& to) { runs(to), runs(to); }));
  names[0].agreed = false;
  submit(names[0]);
  CHECK(refused(runs));  // of another signature than it has now
  number = 2;
  submit(names[1]);
  CHECK(refused(agreed));  // id 5 is that of names[0]
}

TEST(offsets_of_other_ranks_lie_in_the_arenas) {
  const auto segment = Segment::create(2, 1 << 20);
  const uint64_t begin = *segment->offset_of(segment->arena(0).data(), 1);
  const uint64_t end = begin + 2 * segment->arena(0).size();
  const auto refused = [&](uint64_t offset, size_t bytes) {
    return is_malformed([&] { segment->at(offset, bytes); });
  };
  CHECK(!refused(begin, end - begin));
  CHECK(refused(0, 1));
  CHECK(refused(begin - 1, 1));
  CHECK(refused(end, 1));
  CHECK(refused(begin, end - begin + 1));
  CHECK(refused(~0ULL, 1));
}

}  // namespace farandole
