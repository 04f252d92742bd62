// The number by which two builds know whether they understand each other's messages.
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/message_layout.h"
#include "check.h"
#include "transport/tcp_handshake.h"

namespace farandole {
namespace {

enum class Fruit : uint8_t { apple, pear };
enum class Turned : uint8_t { pear, apple };
enum class Grown : uint8_t { apple, pear, plum };

struct Inner {
  uint16_t weight = 0;
  std::string name;
};
struct Outer {
  uint32_t first = 0, second = 0;
  uint64_t wide = 0;
  int32_t below = 0;
  float real = 0;
  bool yes = false;
  Fruit fruit{};
  Turned turned{};
  Grown grown{};
  char fixed[8] = {};
  char longer[9] = {};
  std::vector<int64_t> list;
  Inner inner;
  std::vector<Inner> inners;
  std::optional<Inner> perhaps;
};

struct Whole {
  uint32_t a = 0, b = 0;
};
struct Part : Whole {};

}  // namespace

template <>
inline constexpr auto fields_of<Whole> = Fields<Sent<&Whole::a>, Sent<&Whole::b>>{};
template <>
inline constexpr auto fields_of<Part> = Fields<Sent<&Part::a>>{};
template <>
inline constexpr auto fields_of<Inner> = Fields<Sent<&Inner::weight>, Sent<&Inner::name, 100>>{};

namespace {

template <typename... Each>
constexpr uint64_t layout(Fields<Each...>) {
  LayoutHash hash;
  ((hash.add(name_of_value<Each::kMember>()), add_type<typename Each::Type, Each::kLimit>(hash)),
   ...);
  return hash.value();
}

template <typename... Each>
constexpr uint64_t of() {
  return layout(Fields<Each...>{});
}

using First = Sent<&Outer::first>;
using Second = Sent<&Outer::second>;
using Wide = Sent<&Outer::wide>;

}  // namespace

TEST(message_layouts_differ_by_order_width_type_name_and_bound_of_fields) {
  constexpr std::array all{
      of<First, Second>(),
      of<Second, First>(),        // two of one type change places
      of<First>(),                // one is missing
      of<Wide>(),                 // another width
      of<Sent<&Outer::below>>(),  // signed
      of<Sent<&Outer::real>>(),   // as wide
      of<Sent<&Outer::yes>>(),
      of<Sent<&Outer::fruit, Fruit::pear>>(),
      of<Sent<&Outer::turned, Turned::apple>>(),  // its values in another order
      of<Sent<&Outer::grown, Grown::plum>>(),     // one more of them
      of<Sent<&Outer::fixed>>(),
      of<Sent<&Outer::longer>>(),
      of<Sent<&Outer::list, 8>>(),
      of<Sent<&Outer::list, 9>>(),
      of<Sent<&Outer::inner>>(),
      of<Sent<&Outer::inners, 8>>(),
      of<Sent<&Outer::perhaps>>(),
  };
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const testing::Note note("layouts ", j, " and ", i);
      CHECK(all[i] != all[j]);
    }
}

TEST(message_layouts_know_fields_by_the_names_that_the_compiler_has) {
  CHECK_EQUAL(name_of_value<&Outer::first>(), "first");
  CHECK_EQUAL(name_of_value<Fruit::pear>(), "pear");
  CHECK_EQUAL(name_of_type<Inner>(), "Inner");
  CHECK_EQUAL(last_word("f() [with auto Value = (& a::B::c); T = d]", "Value = "), "c");
  CHECK_EQUAL(last_word("f() [Value = &a::B::c]", "Value = "), "c");
}

TEST(message_layouts_see_what_a_list_of_fields_leaves_out) {
  static_assert(are_all_fields_of<Whole>());
  static_assert(!are_all_fields_of<Part>());
}

TEST(message_layouts_of_this_build_are_those_of_its_protocol) {
  const testing::Note note(
      "messages between hosts have changed: raise the protocol version (kProtocol in "
      "csrc/transport/tcp_handshake.cpp), and write here what is new");
  std::ostringstream now_it_is;
  for (const auto& [what, value] : wire_format())
    if (what != "byte order") now_it_is << what << " " << value << ", ";
  CHECK_EQUAL(now_it_is.str(), "protocol 11, message layouts 9e1bd6f80879d59a, ");
}

}  // namespace farandole
